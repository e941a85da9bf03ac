"""Campaigns tell their figures at the end of a run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for r in terminalreporter.stats.get("passed", []) if "/reliability/" in r.nodeid and r.user_properties]
    if reports:
        terminalreporter.section("figures")
    for report in reports:
        figures = ", ".join(f"{name}: {value}" for name, value in report.user_properties)
        terminalreporter.line(f"{report.nodeid.split('::')[-1]} ({report.duration:.0f} s): {figures}")
