// The fork server inside zygote_process.py: takes requests, forks into boxes, tells of ends. In C, since every object that Python touches
// between two forks is a page to copy. It returns in children only.
#define _GNU_SOURCE
#include "enter.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FDS_MAX 32

// What comes with the fds of a request; then working directory, environment (each NAME=value and NUL), arguments, code.
struct request {
    uint32_t serial, signal, uid, gid, flags, cwd, environment, arguments;
};
enum { ALONE = 1, ASIDE = 2, EMPTY = 4 };

struct __attribute__((packed)) ended {
    uint32_t serial;
    int32_t status;
    double user, system; // seconds
    uint64_t resident;   // bytes
};

struct running {
    pid_t pid;
    uint32_t serial;
};

static double seconds(struct timeval time) { return time.tv_sec + time.tv_usec / 1e6; }

static void tell(int control, struct ended ended) {
    while (send(control, &ended, sizeof ended, MSG_NOSIGNAL) < 0 && errno == EINTR) {}
}

// The calling process becomes a program of the box: namespaces, identity, filter, stdio, working directory, environment. Every other fd is closed, but
// one with code, as 3.
static int become(char *message, const int *fds, int count, const struct sock_fprog *filter, const char **step) {
    struct request *request = (struct request *)message;
    int first = request->flags & EMPTY ? 1 : 0, fixed = (request->flags & ASIDE ? 6 : 5) - first; // pidfd, root, stdio, a file with the code
    *step = "request";
    if (count < fixed) return errno = EINVAL, -1;
    int failed = box_join(fds[0], fds[1], fds + fixed, count - fixed, request->uid, request->gid, request->flags & ALONE, filter, step);
    int error = errno;
    for (int i = first; i < 3; i++)
        if (dup2(fds[2 + i - first], i) < 0) _exit(125); // also to say what went wrong
    if (request->flags & ASIDE && dup2(fds[fixed - 1], 3) < 0) _exit(125);
    if (first) { // no input: the box's own /dev/null, not the host's
        close(0);
        if (!failed && open("/dev/null", O_RDONLY)) _exit(125);
    }
    syscall(SYS_close_range, request->flags & ASIDE ? 4 : 3, ~0U, 0);
    if (failed) return errno = error, -1;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    char *at = message + sizeof *request;
    *step = at;
    if (chdir(at)) return -1;
    at += request->cwd;
    int variables = 0;
    for (char *end = at + request->environment, *one = at; one < end; one += strlen(one) + 1) variables++;
    char **own = calloc(variables + 1, sizeof *own), *copy = malloc(request->environment + 1);
    *step = "environment";
    if (!own || !copy) return -1;
    memcpy(copy, at, request->environment);
    for (int i = 0; i < variables; i++, copy += strlen(copy) + 1) own[i] = copy;
    environ = own;
    return 0;
}

static void reap(int control, struct running *running, int *count) {
    int status;
    struct rusage use;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &use)) > 0;)
        for (int i = 0; i < *count; i++)
            if (running[i].pid == pid) {
                tell(control, (struct ended){running[i].serial, status, seconds(use.ru_utime), seconds(use.ru_stime), use.ru_maxrss * 1024ULL});
                running[i] = running[--*count];
                break;
            }
}

int box_serve(int control, const struct sock_fprog *filter, char *message, size_t room, size_t *size, const char **step) {
    int own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL); // a child unblocks it
    int children = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC), count = 0, capacity = 0;
    struct running *running = NULL;
    if (own < 0 || children < 0) _exit(71);
    for (;;) {
        struct pollfd waits[] = {{.fd = control, .events = POLLIN}, {.fd = children, .events = POLLIN}};
        if (poll(waits, 2, -1) < 0 && errno != EINTR) _exit(72);
        if (waits[1].revents) {
            struct signalfd_siginfo info[8];
            while (read(children, info, sizeof info) > 0) {}
            reap(control, running, &count);
        }
        if (!waits[0].revents) continue;
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
        } space;
        struct iovec part = {message, room};
        struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
        ssize_t length = recvmsg(control, &header, MSG_CMSG_CLOEXEC);
        if (length < 0 && errno == EINTR) continue;
        if (length <= 0) _exit(0); // no zygote without its host
        int fds[FDS_MAX], given = 0;
        for (struct cmsghdr *one = CMSG_FIRSTHDR(&header); one; one = CMSG_NXTHDR(&header, one))
            if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
                int here = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                if (given + here > FDS_MAX) _exit(73);
                memcpy(fds + given, CMSG_DATA(one), here * sizeof(int));
                given += here;
            }
        struct request request = {0};
        memcpy(&request, message, (size_t)length < sizeof request ? (size_t)length : sizeof request);
        if (request.signal) { // for what an earlier request started, and its group: it leads a session
            for (int i = 0; i < count; i++)
                if (running[i].serial == request.serial) kill(-running[i].pid, request.signal), kill(running[i].pid, request.signal);
        } else {
            pid_t pid = -1;
            if (count == capacity) {
                struct running *more = realloc(running, (capacity + 64) * sizeof *running);
                if (more) running = more, capacity += 64;
            }
            if (count < capacity && given && (size_t)length >= sizeof request && !setns(fds[0], CLONE_NEWPID)) { // born in the box's own numbering
                pid = fork();
                if (pid == 0) {
                    *size = length;
                    return become(message, fds, given, filter, step);
                }
                if (setns(own, CLONE_NEWPID)) _exit(74);
            }
            if (pid > 0) running[count++] = (struct running){pid, request.serial};
            else tell(control, (struct ended){.serial = request.serial, .status = 125 << 8});
        }
        memset(message, 0, length); // a child has all that is in this memory: nothing of another's request may be
        for (int i = 0; i < given; i++) close(fds[i]);
    }
}
