// Starts a program (QEMU, its network) where a break-out finds nothing: no files but /usr, no network, no neighbours, no privileges.
//   vmjail make              makes the namespaces, says "ready", reads lines +PID and -PID; when they end (the host is gone) it ends those still there
//   vmjail run UID MNT NET IPC TASKS PROGRAM ARGUMENTS…   joins them (fds, -1: keep), then the cgroups (fds, comma), then becomes PROGRAM (an fd)
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static void must(int result, const char *what) {
    if (result >= 0) return;
    dprintf(2, "vmjail: %s: %s\n", what, strerror(errno));
    _exit(71);
}

static void show(const char *path) { // a directory of the host, read-only, or the same link
    char target[64], goal[64];
    struct stat st;
    snprintf(target, sizeof target, "/mnt%s", path);
    if (lstat(path, &st)) return;
    if (S_ISLNK(st.st_mode)) {
        ssize_t length = readlink(path, goal, sizeof goal - 1);
        must(length, path);
        goal[length] = 0;
        must(symlink(goal, target), target);
        return;
    }
    if (S_ISDIR(st.st_mode)) must(mkdir(target, 0755), target);
    else must(close(open(target, O_CREAT | O_WRONLY, 0644)), target);
    must(mount(path, target, NULL, MS_BIND, NULL), target);
    must(mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL), target);
}

static int make(void) {
    must(unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC), "unshare");
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
    must(mount("tmpfs", "/mnt", "tmpfs", MS_NOSUID, "size=64k,mode=755"), "tmpfs");
    show("/usr"), show("/lib"), show("/lib64"), show("/bin");
    must(mkdir("/mnt/etc", 0755), "etc");
    show("/etc/ld.so.cache");
    must(mkdir("/mnt/proc", 0755), "proc");
    // A program may reopen its own fds by name; of others it sees nothing.
    must(mount("proc", "/mnt/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "hidepid=invisible,subset=pid"), "proc");
    must(mkdir("/mnt/dev", 0755), "dev");
    static const struct { const char *path; int major, minor; } devices[] = {{"/mnt/dev/null", 1, 3}, {"/mnt/dev/zero", 1, 5}, {"/mnt/dev/urandom", 1, 9}, {"/mnt/dev/kvm", 10, 232}};
    umask(0);
    for (int i = 0; i < 4; i++)
        must(mknod(devices[i].path, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor)), devices[i].path);
    must(mount(NULL, "/mnt", NULL, MS_REMOUNT | MS_NOSUID | MS_RDONLY, "size=64k,mode=755"), "read-only");
    must(chdir("/mnt"), "chdir");
    must(syscall(SYS_pivot_root, ".", "."), "pivot_root");
    must(umount2(".", MNT_DETACH), "umount");
    must(write(1, "ready\n", 6), "write");
    for (int fd = 1; fd < 3; fd++) close(fd);
    static pid_t guarded[65536];
    int count = 0, pid;
    char sign;
    while (scanf(" %c%d", &sign, &pid) == 2) {
        int at = 0;
        while (at < count && guarded[at] != pid) at++;
        if (sign == '-' && at < count) guarded[at] = guarded[--count];
        else if (sign == '+' && at == count && count < 65536 && pid > 1) guarded[count++] = pid;
    }
    for (int at = 0; at < count; at++) kill(guarded[at], SIGKILL);
    return 0;
}

static void join(const char *fd, int kind, const char *what) {
    if (atoi(fd) < 0) return;
    must(setns(atoi(fd), kind), what);
    close(atoi(fd));
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "make")) return make();
    if (argc < 9 || strcmp(argv[1], "run")) return dprintf(2, "usage: vmjail run UID MNT NET IPC TASKS PROGRAM ARGUMENTS\n"), 64;
    for (char *rest = argv[6], *one; (one = strsep(&rest, ","));) {
        if (!*one) continue;
        must(write(atoi(one), "0", 1), "cgroup"); // by ourselves: another's pid would stall on cgroup v1
        close(atoi(one));
    }
    join(argv[3], CLONE_NEWNS, "mount namespace");
    join(argv[4], CLONE_NEWNET, "network namespace");
    join(argv[5], CLONE_NEWIPC, "ipc namespace");
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    uid_t first = strtoul(argv[2], NULL, 10);
    if (first) { // every process its own: one that is taken over can't signal or trace another
        uid_t uid = first + getpid();
        must(setgroups(0, NULL), "setgroups");
        must(setresgid(uid, uid, uid), "setresgid");
        must(setresuid(uid, uid, uid), "setresuid");
    }
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    umask(077);
    int program = atoi(argv[7]);
    fcntl(program, F_SETFD, FD_CLOEXEC);
    char *none[] = {NULL};
    syscall(SYS_execveat, program, "", argv + 8, none, AT_EMPTY_PATH);
    must(-1, argv[8]);
}
