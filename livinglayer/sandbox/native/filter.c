#define _GNU_SOURCE
// Writes the seccomp filter of boxes: an allow-list of the names in syscalls.txt. `filter SYSCALLS OUT`, run once when the C is built.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif
#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: filter SYSCALLS OUT\n"), 64;
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    FILE *list = fopen(argv[1], "r");
    if (!filter || !list) return perror(argv[1]), 66;
    seccomp_attr_set(filter, SCMP_FLTATR_CTL_OPTIMIZE, 2); // a binary tree
    int failed = 0;
    char line[1024];
    while (fgets(line, sizeof line, list)) {
        line[strcspn(line, "# \t\n")] = 0;
        if (!*line) continue;
        int number = seccomp_syscall_resolve_name(line);
        if (number == __NR_SCMP_ERROR) fprintf(stderr, "filter: %s is unknown here, so it stays refused\n", line);
        else if (number >= 0 && seccomp_rule_add(filter, SCMP_ACT_ALLOW, number, 0)) failed++, fprintf(stderr, "filter: %s\n", line);
    }
    fclose(list);
    const unsigned long namespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWTIME;
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, namespaces & ~0xffUL, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0); // its flags lie in memory, where a filter can't look: libc falls back to clone
    // Only the families that programs need: no vsock to a hypervisor, no packets, no kernel crypto.
    const int families[] = {AF_UNIX, AF_INET, AF_INET6};
    for (int i = 0; i < 3; i++) failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(socket), 1, SCMP_A0_32(SCMP_CMP_EQ, families[i], 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(socket), 2, SCMP_A0_32(SCMP_CMP_EQ, AF_NETLINK, 0), SCMP_A2_32(SCMP_CMP_EQ, 0 /* NETLINK_ROUTE */, 0));
    // Audit is answered as by a kernel without it: adduser goes on then, and would give up at EPERM.
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPROTONOSUPPORT), SCMP_SYS(socket), 2, SCMP_A0_32(SCMP_CMP_EQ, AF_NETLINK, 0), SCMP_A2_32(SCMP_CMP_EQ, 9 /* NETLINK_AUDIT */, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ERRNO(EAFNOSUPPORT), SCMP_SYS(socket), 1, SCMP_A0_32(SCMP_CMP_GT, AF_NETLINK, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(socketpair), 1, SCMP_A0_32(SCMP_CMP_EQ, AF_UNIX, 0));
    // A box may not push characters into a terminal.
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1, SCMP_A1_32(SCMP_CMP_NE, 0x5412 /* TIOCSTI */, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(prctl), 1, SCMP_A0_32(SCMP_CMP_NE, 22 /* PR_SET_SECCOMP */, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(personality), 1, SCMP_A0_32(SCMP_CMP_EQ, 0, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(personality), 1, SCMP_A0_32(SCMP_CMP_EQ, 0xffffffff, 0));
    failed += !!seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(prlimit64), 1, SCMP_A0_32(SCMP_CMP_EQ, 0, 0)); // one's own limits, not those of the agent
    int out = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (out < 0 || seccomp_export_bpf(filter, out) || close(out)) return perror(argv[2]), 73;
    return failed ? 70 : 0;
}
