// The spawner: makes namespace boxes for one host process, keeps the fds of those that are to outlive it, reaps them all.
// `spawner STATE FILTER BASE COUNT` with fd 3 listening (SOCK_SEQPACKET). One client at a time, one message a request.
// When the client goes, its ephemeral boxes go too; with no box left the spawner ends.
#define _GNU_SOURCE
#include "agent.h"
#include "enter.h"
#include "wire.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LISTENER 3
#if defined WITHOUT_PIDNS
#define NEW_NAMESPACES (CLONE_NEWIPC | CLONE_NEWUTS)
#elif defined WITHOUT_IPCNS
#define NEW_NAMESPACES (CLONE_NEWPID | CLONE_NEWUTS)
#elif defined WITHOUT_UTSNS
#define NEW_NAMESPACES (CLONE_NEWPID | CLONE_NEWIPC)
#else
#define NEW_NAMESPACES (CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS)
#endif
#define MESSAGE_MAX 32768
#define FDS_MAX 128
#define HOLD_MAX 16
#define NAME_MAX_ 64
#define LAYER_NAME_MAX 200
#define CACHED 2         // layers kept open for each range
#define CACHED_RANGES 64 // and for how many: every fd here is copied at each clone

enum { SPAWN = 1, KILL = 2, RESIDENTS = 3, ROOT = 4, RELEASE = 5, HOLD = 6, EXITED = 32, REPLY = 33, HELD = 34 };
enum { KEEP = 1, BY_PATH = 2 };

struct head {
    uint32_t op, serial, flags, tasks, layers, mounts, hold;
    uint32_t spare;
    uint64_t shm;
};

struct reply {
    uint32_t op, serial;
    int32_t value; // a pid, an exit status, or -errno
    uint32_t base;
};

struct range { // one box's 65,536 ids
    struct range *next;
    uint32_t base;
    int user;
    struct { // mounts of layers that were idmapped into this range: the next box of it likely stands on the same
        char name[LAYER_NAME_MAX];
        int fd;
    } layers[CACHED];
    int cached;
};

struct resident {
    struct resident *next;
    char name[NAME_MAX_];
    pid_t pid; // 0: only a root was made
    uint32_t flags;
    struct range *range;
    int held[HOLD_MAX], hold_count;
};

static struct resident *residents;
static struct range *ranges;
static uint32_t next_base, ranges_left;
static struct sock_fprog filter;
static int client = -1;
static char *title; // our own argv, which a box would see as that of its PID 1
static size_t title_size;

static void say(uint32_t op, uint32_t serial, int32_t value, uint32_t base, const char *text, const int *fds, int count) {
    struct reply reply = {op, serial, value, base};
    struct iovec parts[] = {{&reply, sizeof reply}, {(char *)text, strlen(text) + 1}};
    char room[CMSG_SPACE(sizeof(int) * HOLD_MAX)] = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (count) {
        message.msg_control = room;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int) * count)};
        memcpy(CMSG_DATA(header), fds, sizeof(int) * count);
    }
    if (client >= 0 && sendmsg(client, &message, MSG_NOSIGNAL) < 0) {} // a client that is gone is noticed by the loop
}

static struct range *take_range(void) {
    struct range *range = ranges;
    if (range) {
        ranges = range->next;
        return range;
    }
    if (!ranges_left) return errno = EUSERS, NULL;
    int user = make_user_namespace(next_base);
    if (user < 0 || !(range = malloc(sizeof *range))) return NULL;
    *range = (struct range){.base = next_base, .user = user};
    next_base += 65536;
    ranges_left--;
    return range;
}

static void give_range(struct range *range) {
    if (!range) return;
    range->next = ranges;
    ranges = range;
}

static int range_count, host_layer = -1;

static void drop_layers(struct range *range) {
    if (range->cached) range_count--;
    while (range->cached) close(range->layers[--range->cached].fd);
}

// The mounts of a box's layers, from the range's own where it has them.
static void find_layers(struct box *box, struct range *range) {
    for (int at = 0, i = 0; at < range->cached; at++, i = 0) { // other layers than last time: begin anew
        while (i < box->layer_count && strcmp(range->layers[at].name, box->layers[i])) i++;
        if (i == box->layer_count) drop_layers(range);
    }
    for (int i = 0; i < box->layer_count; i++) {
        box->layer_fds[i] = -1;
        if (box->by_path) continue; // that way uses a mount up
        if (!strcmp(box->layers[i], "host")) {
            if (host_layer < 0) host_layer = open_layer(box, "host");
            box->layer_fds[i] = host_layer;
            continue;
        }
        int at = 0;
        while (at < range->cached && strcmp(range->layers[at].name, box->layers[i])) at++;
        if (at == range->cached && at < CACHED) {
            if (!range->cached && range_count >= CACHED_RANGES) continue;
            int fd = open_layer(box, box->layers[i]);
            if (fd < 0) continue; // the box will say what is wrong
            range_count += !range->cached;
            strcpy(range->layers[at].name, box->layers[i]);
            range->layers[range->cached++].fd = fd;
        }
        if (at < range->cached) box->layer_fds[i] = range->layers[at].fd;
    }
}

static struct resident *find(const char *name) {
    for (struct resident *resident = residents; resident; resident = resident->next)
        if (!strcmp(resident->name, name)) return resident;
    return NULL;
}

static void forget(struct resident *resident) {
    for (struct resident **link = &residents; *link; link = &(*link)->next)
        if (*link == resident) {
            *link = resident->next;
            break;
        }
    for (int i = 0; i < resident->hold_count; i++) close(resident->held[i]);
    give_range(resident->range);
    free(resident);
}

// Names become host names and directory names: letters, digits and hyphens only.
static bool good_name(const char *name) {
    size_t length = strlen(name);
    return length && length < NAME_MAX_ && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == length && *name != '-';
}

static bool good_layer(const char *name) {
    size_t length = strlen(name);
    return length && length < LAYER_NAME_MAX && *name != '.' && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == length;
}

static __attribute__((noreturn)) void be_box(struct box *box, int control) {
    const char *step = "";
    if (box_enter(box, &step)) {
        char message[512];
        struct frame frame = {.length = 4 + strnlen(step, sizeof message - sizeof frame - 5) + 1, .id = 0, .kind = DONE}; // a mount's path may be longer
        memcpy(message, &frame, sizeof frame);
        memcpy(message + sizeof frame, &(uint32_t){errno}, 4);
        snprintf(message + sizeof frame + 4, sizeof message - sizeof frame - 4, "%s", step);
        if (write(control, message, sizeof frame + frame.length) < 0) {}
        _exit(111);
    }
    // Nothing of the spawner's stays open in the box: not its listener, not other boxes' fds (trap 3).
    if (dup3(control, 3, O_CLOEXEC) < 0 && control != 3) _exit(112);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC); // the spawner's own is a file of the host's, and so is its log
    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0) _exit(113);
#ifndef WITHOUT_CLOSING
    syscall(SYS_close_range, 4, ~0U, 0);
#endif
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    memset(title, 0, title_size);
    strncpy(title, "agent", title_size - 1);
    prctl(PR_SET_NAME, "agent");
    _exit(agent_main(3, 3, -1, false));
}

static void spawn(const struct head *head, const char *at, const char *end, int *fds, int count) {
    struct box box = {.network = -1, .shm_bytes = head->shm, .filter = &filter, .by_path = head->flags & BY_PATH};
    const char *strings[1 + LAYERS_MAX + MOUNTS_MAX];
    bool rooting = head->op == ROOT; // only the mount: no control socket, no network
    uint32_t fixed = rooting ? 0 : 2, wanted = 1 + head->layers + head->mounts;
    if (head->tasks > TASKS_MAX || head->layers > LAYERS_MAX || !head->layers || head->mounts > MOUNTS_MAX || head->hold > HOLD_MAX ||
        (uint32_t)count != fixed + head->tasks + head->mounts + head->hold)
        return say(REPLY, head->serial, -EINVAL, 0, "request", NULL, 0);
    for (uint32_t i = 0; i < wanted; i++) {
        const char *nul = memchr(at, 0, end - at);
        if (!nul) return say(REPLY, head->serial, -EINVAL, 0, "request", NULL, 0);
        strings[i] = at;
        at = nul + 1;
    }
    box.name = box.upper = strings[0];
    if (!good_name(box.name)) return say(REPLY, head->serial, -EINVAL, 0, "name", NULL, 0);
    if (find(box.name)) return say(REPLY, head->serial, -EEXIST, 0, "name", NULL, 0);
    for (uint32_t i = 0; i < head->layers; i++) {
        box.layers[box.layer_count++] = strings[1 + i];
        if (!good_layer(strings[1 + i])) return say(REPLY, head->serial, -EINVAL, 0, "layer", NULL, 0);
    }
    int control = rooting ? -1 : fds[0];
    if (!rooting) box.network = fds[1];
    int *next = fds + fixed;
    for (uint32_t i = 0; i < head->tasks; i++) box.tasks[box.task_count++] = *next++;
    for (uint32_t i = 0; i < head->mounts; i++) box.mounts[box.mount_count++] = (struct mount_in){*next++, strings[1 + head->layers + i]};

    struct resident *resident = calloc(1, sizeof *resident);
    if (!resident || !(resident->range = take_range())) {
        free(resident);
        return say(REPLY, head->serial, -errno, 0, "ids", NULL, 0);
    }
    strcpy(resident->name, box.name);
    resident->flags = head->flags;
    box.base = resident->range->base;
    box.user = resident->range->user;
    for (int i = 0; i < box.mount_count; i++) { // a volume: its files belong to the ids of whichever box sees them
        if (box.mounts[i].path[0] != '+') continue;
        box.mounts[i].path++;
        if (map_mount(box.mounts[i].fd, box.user)) {
            int error = errno;
            give_range(resident->range);
            free(resident);
            return say(REPLY, head->serial, -error, 0, "volume", NULL, 0);
        }
    }
    find_layers(&box, resident->range);
    resident->next = residents;
    residents = resident;
    if (rooting) {
        const char *step = "";
        int root = box_root(&box, &step), user = box.user;
        if (root < 0) {
            int error = errno;
            forget(resident);
            return say(REPLY, head->serial, -error, 0, step, NULL, 0);
        }
        say(REPLY, head->serial, 0, box.base, "", (int[]){root, user}, 2);
        close(root);
        return;
    }
    int pidfd = -1;
    struct clone_args arguments = {.flags = CLONE_NEWNS | NEW_NAMESPACES | CLONE_PIDFD,
                                   .pidfd = (uintptr_t)&pidfd, .exit_signal = SIGCHLD};
    pid_t pid = syscall(SYS_clone3, &arguments, sizeof arguments);
    if (pid == 0) be_box(&box, control);
    if (pid < 0) {
        int error = errno;
        forget(resident);
        return say(REPLY, head->serial, -error, 0, "clone", NULL, 0);
    }
    resident->pid = pid;
    for (uint32_t i = 0; i < head->hold; i++) {
        resident->held[resident->hold_count++] = *next;
        *next++ = -1; // ours now
    }
    say(REPLY, head->serial, pid, box.base, "", &pidfd, 1);
    close(pidfd);
}

static void answer(char *message, ssize_t length, int *fds, int count) {
    struct head head;
    if ((size_t)length < sizeof head) return say(REPLY, 0, -EINVAL, 0, "request", NULL, 0);
    memcpy(&head, message, sizeof head);
    const char *at = message + sizeof head, *end = message + length;
    if (head.op == SPAWN || head.op == ROOT) return spawn(&head, at, end, fds, count);
    if (head.op == RESIDENTS) {
        for (struct resident *resident = residents; resident; resident = resident->next)
            say(HELD, head.serial, resident->pid, resident->range ? resident->range->base : 0, resident->name, resident->held, resident->hold_count);
        return say(REPLY, head.serial, 0, 0, "", NULL, 0);
    }
    struct resident *resident = at < end && memchr(at, 0, end - at) ? find(at) : NULL;
    if (!resident && head.op == HOLD && at < end && memchr(at, 0, end - at) && good_name(at) && (resident = calloc(1, sizeof *resident))) {
        strcpy(resident->name, at); // a box of another tier: only its fds are kept here
        resident->next = residents;
        residents = resident;
    }
    if (!resident) return say(REPLY, head.serial, -ENOENT, 0, "name", NULL, 0);
    if (head.op == KILL && resident->pid) {
        kill(resident->pid, SIGKILL); // our own child, not yet reaped: the number can't be anyone else's
    } else if (head.op == RELEASE && !resident->pid) {
        forget(resident);
    } else if (head.op == HOLD) { // a box becomes one that stays
        resident->flags |= KEEP;
        for (int i = 0; i < count && resident->hold_count < HOLD_MAX; i++) {
            resident->held[resident->hold_count++] = fds[i];
            fds[i] = -1;
        }
    } else {
        return say(REPLY, head.serial, -EINVAL, 0, "op", NULL, 0);
    }
    say(REPLY, head.serial, 0, 0, "", NULL, 0);
}

// Returns false when the client has gone.
static bool serve(void) {
    static char message[MESSAGE_MAX];
    char room[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    struct iovec part = {message, sizeof message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t length = recvmsg(client, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0) return errno == EAGAIN || errno == EINTR;
    if (length == 0) return false;
    int fds[FDS_MAX], count = 0;
    for (struct cmsghdr *control = CMSG_FIRSTHDR(&header); control; control = CMSG_NXTHDR(&header, control))
        if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
            int here = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds + count, CMSG_DATA(control), here * sizeof(int));
            count += here;
        }
    if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) say(REPLY, 0, -EMSGSIZE, 0, "request", NULL, 0);
    else answer(message, length, fds, count);
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
    return true;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (struct resident *resident = residents; resident; resident = resident->next)
            if (resident->pid == pid) {
                char name[NAME_MAX_];
                strcpy(name, resident->name);
                forget(resident);
                say(EXITED, 0, status, 0, name, NULL, 0);
                break;
            }
}

static void client_gone(void) {
    close(client);
    client = -1;
    for (struct resident *resident = residents, *next; resident; resident = next) {
        next = resident->next;
        if (resident->flags & KEEP) continue;
        if (!resident->pid) forget(resident);
        else kill(resident->pid, SIGKILL);
    }
}

static int load_filter(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) || st.st_size % 8 || st.st_size / 8 > 4096 || !st.st_size) return -1;
    filter.filter = malloc(st.st_size);
    filter.len = st.st_size / 8;
    bool whole = filter.filter && read(fd, filter.filter, st.st_size) == st.st_size;
    close(fd);
    return whole ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc != 5) return fprintf(stderr, "usage: spawner STATE FILTER BASE COUNT\n"), 64;
    title = argv[0];
    title_size = argv[argc - 1] + strlen(argv[argc - 1]) + 1 - argv[0];
    next_base = strtoul(argv[3], NULL, 10);
    ranges_left = strtoul(argv[4], NULL, 10);
    if (next_base < 65536) return fprintf(stderr, "spawner: the first id must be 65536 or more\n"), 64; // trap 1: never host root's
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_NAME, "layer-spawner");
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    struct rlimit files = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_NOFILE, &files);
    syscall(SYS_close_range, LISTENER + 1, ~0U, 0);
    fcntl(LISTENER, F_SETFD, FD_CLOEXEC);
    int children = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0) return perror("spawner: signalfd"), 71;
    if (load_filter(argv[2])) return perror("spawner: seccomp filter"), 72;
    if (enter_empty_root(argv[1])) return perror("spawner: root"), 73;
    bool served = false;
    for (;;) {
        if (served && client < 0 && !residents) return 0;
        struct pollfd waits[] = {{.fd = children, .events = POLLIN}, {.fd = LISTENER, .events = POLLIN}, {.fd = client, .events = POLLIN}};
        if (poll(waits, client < 0 ? 2 : 3, -1) < 0 && errno != EINTR) return perror("spawner: poll"), 74;
        if (waits[0].revents) {
            struct signalfd_siginfo info;
            while (read(children, &info, sizeof info) > 0) {}
            reap();
        }
        if (waits[1].revents) {
            int next = accept4(LISTENER, NULL, NULL, SOCK_CLOEXEC);
            struct ucred peer = {0};
            socklen_t size = sizeof peer;
            bool ours = next >= 0 && !getsockopt(next, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == geteuid();
            if (ours && client < 0) client = next, served = true;
            else if (next >= 0) close(next);
        } else if (client >= 0 && waits[2].revents && !serve()) {
            client_gone();
        }
    }
}
