// The agent as a program of its own: `agent IN OUT [DIRECTORY]`, for the tiers whose runtime starts it.
#define _GNU_SOURCE
#include "agent.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <signal.h>

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: agent IN OUT [DIRECTORY]\n");
        return 64;
    }
    int directory = -1;
    if (argc > 3) { // tier process: orphans come to us, and we go when the host goes
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL); // the host's own came with us, with the right to read it
        directory = open(argv[3], O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0) return perror(argv[3]), 66;
    }
    int in = atoi(argv[1]), out = atoi(argv[2]);
    fcntl(in, F_SETFD, FD_CLOEXEC);
    fcntl(out, F_SETFD, FD_CLOEXEC);
    return agent_main(in, out, directory, false);
}
