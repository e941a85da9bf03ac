"""Every error a caller may meet.

LayerError
├── Invalid          400  the request itself is wrong: unknown field, wrong type, broken constraint
├── Unauthenticated  401  nobody we know
├── Denied           403  known, not allowed; names the permission rows that decided
├── NotFound         404  not there, or not yours to see
├── Conflict         409  the row is not in the state this verb needs
├── LimitExceeded    429  too large, too many
├── Corrupt          500  stored content is not what was written
├── Incompatible     500  stored by a newer release
├── Unavailable      503  the engine can't serve this now; trying again may help
└── TimedOut         504  the deadline passed; nothing was changed
"""


class LayerError(Exception):
    """Something the layer refused or could not do; `hint` says what to try."""

    code, status, exit_code = "error", 500, 1

    def __init__(self, message: str, hint: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message, self.hint, self.details = message, hint, details

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:  # errors cross from reader processes
        return (_rebuild, (type(self), self.message, self.hint, self.details))


def _rebuild(kind: type[LayerError], message: str, hint: str | None, details: dict[str, object]) -> LayerError:
    return kind(message, hint, **details)


class Invalid(LayerError):
    """The request itself is wrong."""

    code, status, exit_code = "invalid", 400, 2


class Unauthenticated(LayerError):
    """No token, or one that nobody holds."""

    code, status, exit_code = "unauthenticated", 401, 3


class Denied(LayerError):
    """The principal is known and may not do this."""

    code, status, exit_code = "denied", 403, 3
    recorded = False  # whether the ledger knows of it


class NotFound(LayerError):
    """It is not there, or not for this principal to see."""

    code, status, exit_code = "not_found", 404, 4


class Conflict(LayerError):
    """The row is not in the state this verb needs."""

    code, status, exit_code = "conflict", 409, 5


class LimitExceeded(LayerError):
    """Larger or more than the limit allows."""

    code, status, exit_code = "limit_exceeded", 429, 6


class Corrupt(LayerError):
    """Stored content is not what was written."""

    code, status, exit_code = "corrupt", 500, 7


class Incompatible(LayerError):
    """The layer was written by a newer release."""

    code, status, exit_code = "incompatible", 500, 7


class Unavailable(LayerError):
    """The engine can't serve this now."""

    code, status, exit_code = "unavailable", 503, 8


class TimedOut(LayerError):
    """The deadline passed."""

    code, status, exit_code = "timed_out", 504, 9
