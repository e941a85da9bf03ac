#pragma once
#include <stdbool.h>

// Serves the host over `in` and `out` until it hangs up (never, when lasting). `directory` >= 0: an fd that stands for "/", on tier process.
int agent_main(int in, int out, int directory, bool lasting);
