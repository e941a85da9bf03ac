// The guest agent: PID 1 of a box. Runs commands, touches files and opens connections as the host asks, and reaps.
// It lives inside the box with the box's rights, so nothing it is asked for can reach further than the box itself.
#define _GNU_SOURCE
#include "agent.h"
#include "wire.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define CHUNK 32768
#define TREE_DEPTH 128
#define CORK_MAX 32768
#define CORK_MS 60

// One conversation with the host: a command, a file being read or written, a connection, a watch.
struct talk {
    struct talk *next;
    uint32_t id;
    enum { COMMAND, READING, WRITING, CONNECTION, WATCHING } kind;
    pid_t pid;          // of a command
    bool exited, drain; // drain: the host has heard EXIT; what is still written is read and dropped
    int status;
    struct rusage usage;
    int in, out, err;   // to stdin; from stdout and stderr (-1: none). A terminal or a connection has in == out.
    int64_t window;     // bytes the host still takes
    char *queue;        // input that stdin would not take yet
    size_t queued, room;
    bool input_end, muted_out, muted_err, wants_write;
    char **watched;     // path of each inotify watch
    int watches;
    bool recursive;
    int64_t left;       // of a file being read; -1: all of it
    char *cork;         // frames that wait for the next ones, and until when at most
    size_t held;
    int64_t corked_at, uncork_at;
};

static int control_in, control_out, poller, root = -1;
static bool rooted; // root is a directory of its own rather than "/" (tier process)
static struct talk *talks;
static int corks;

// ---- sending ----

static void send_all(const struct iovec *parts, int count) {
    struct iovec left[3];
    memcpy(left, parts, sizeof *parts * count);
    struct iovec *part = left;
    while (count) {
        ssize_t sent = writev(control_out, part, count);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) {
                poll(&(struct pollfd){.fd = control_out, .events = POLLOUT}, 1, -1);
                continue;
            }
            return; // the host is gone; the loop notices
        }
        while (count && (size_t)sent >= part->iov_len) sent -= part->iov_len, part++, count--;
        if (count) part->iov_base = (char *)part->iov_base + sent, part->iov_len -= sent;
    }
}

static void send_frame(uint32_t id, uint32_t kind, const void *payload, uint32_t length) {
    struct frame frame = {length, id, kind};
    struct iovec parts[] = {{&frame, sizeof frame}, {(void *)payload, length}};
    send_all(parts, length ? 2 : 1);
}

static void send_done(uint32_t id, int error, const char *what) {
    char payload[512];
    memcpy(payload, &(uint32_t){error}, 4);
    int length = snprintf(payload + 4, sizeof payload - 4, "%s", what);
    if (length > (int)sizeof payload - 5) length = sizeof payload - 5;
    send_frame(id, DONE, payload, 4 + length + 1);
}

// ---- reading requests; every read checks its bounds, since the host may be replaced by an attacker in a VM's guest too ----

struct request {
    const char *at, *end;
    bool bad;
};

static uint32_t take_u32(struct request *request) {
    uint32_t value = 0;
    if (request->end - request->at < 4) return request->bad = true, 0;
    memcpy(&value, request->at, 4);
    request->at += 4;
    return value;
}

static const char *take_str(struct request *request) {
    const char *text = request->at, *nul = memchr(text, 0, request->end - text);
    if (!nul) return request->bad = true, "";
    request->at = nul + 1;
    return text;
}

// ---- users ----

struct user {
    uid_t uid;
    gid_t gid;
    char name[64], home[256];
};

// The box's root may have put anything there: a FIFO would hold us for ever, a file without end for as long as it lasts.
static FILE *open_table(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;
    if (fd >= 0 && (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size > 1 << 20)) close(fd), fd = -1;
    return fd < 0 ? NULL : fdopen(fd, "r");
}

static int find_user(const char *wanted, struct user *user) {
    *user = (struct user){.uid = 0, .gid = 0, .name = "root", .home = "/root"};
    if (rooted) { // tier process has one user: whoever the agent runs as
        strcpy(user->name, "user");
        strcpy(user->home, "/home/user");
        return 0;
    }
    if (!*wanted || !strcmp(wanted, "root")) return 0;
    char *end;
    unsigned long number = strtoul(wanted, &end, 10);
    bool numeric = end != wanted && (!*end || *end == ':') && number < 65536;
    if (numeric) {
        user->uid = user->gid = number;
        if (*end == ':') {
            unsigned long group = strtoul(end + 1, &end, 10);
            if (*end || group >= 65536) return errno = EINVAL, -1;
            user->gid = group;
        }
        snprintf(user->name, sizeof user->name, "%lu", number);
        strcpy(user->home, "/");
    }
    FILE *file = open_table("/etc/passwd");
    char line[1024];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        char *rest = line, *name = strsep(&rest, ":");
        strsep(&rest, ":");
        char *uid = strsep(&rest, ":"), *gid = strsep(&rest, ":");
        strsep(&rest, ":");
        char *home = strsep(&rest, ":");
        if (!home || (numeric ? strtoul(uid, NULL, 10) != number : strcmp(name, wanted))) continue;
        found = true;
        user->uid = strtoul(uid, NULL, 10);
        if (!strchr(wanted, ':')) user->gid = strtoul(gid, NULL, 10);
        snprintf(user->name, sizeof user->name, "%s", name);
        snprintf(user->home, sizeof user->home, "%s", home);
    }
    if (file) fclose(file);
    return found || numeric ? 0 : (errno = ENOENT, -1);
}

// Files are touched with the user's own rights, so that the kernel decides what it may reach.
static int become(const char *name) {
    struct user user;
    if (find_user(name, &user)) return -1;
    if (!user.uid || rooted) return 0;
    if (syscall(SYS_setresgid, -1, user.gid, -1) || syscall(SYS_setresuid, -1, user.uid, -1)) return -1;
    return 0;
}

// "A>B" as a user: with the rights of A, and what is made belongs to B.
static struct user owner;
static bool owned;

static int act_as(const char *who) {
    char name[64];
    const char *mark = strchr(who, '>');
    size_t length = mark ? (size_t)(mark - who) : strlen(who);
    if (length >= sizeof name) return errno = ENOENT, -1;
    memcpy(name, who, length);
    name[length] = 0;
    owned = mark && !rooted;
    if (owned && find_user(mark + 1, &owner)) return -1;
    return become(name);
}

static void give(int directory, const char *name) {
    if (owned && fchownat(directory, name, owner.uid, owner.gid, AT_SYMLINK_NOFOLLOW)) {}
}

// Names of numbers, found once for each request: a listing asks for the same few again and again.
static struct {
    uint32_t id;
    bool group;
    char name[64];
} names[8];
static int named;

static const char *name_of(uint32_t id, bool group) {
    for (int i = 0; i < named; i++)
        if (names[i].id == id && names[i].group == group) return names[i].name;
    int slot = named < 8 ? named++ : 7;
    names[slot].id = id;
    names[slot].group = group;
    snprintf(names[slot].name, sizeof names[slot].name, "%u", id);
    FILE *file = rooted ? NULL : open_table(group ? "/etc/group" : "/etc/passwd");
    char line[4096];
    while (file && fgets(line, sizeof line, file)) {
        char *rest = line, *name = strsep(&rest, ":");
        strsep(&rest, ":");
        char *number = strsep(&rest, ":"), *end;
        if (!number || strtoul(number, &end, 10) != id || end == number) continue;
        snprintf(names[slot].name, sizeof names[slot].name, "%s", name);
        break;
    }
    if (file) fclose(file);
    if (rooted && id == (group ? getgid() : getuid())) strcpy(names[slot].name, "user");
    return names[slot].name;
}

static void become_root(void) {
    int kept = errno;
    if (!rooted && (syscall(SYS_setresuid, -1, 0, -1) || syscall(SYS_setresgid, -1, 0, -1))) _exit(70);
    errno = kept;
}

// ---- files ----

// A box is chrooted, so any path stays inside; on tier process "/" is the box's directory and openat2 keeps paths in it.
static int open_path(const char *path, int flags, mode_t mode) {
    if (!rooted) return open(path, flags | O_CLOEXEC, mode);
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
#ifdef WITHOUT_OPENAT2
    path += strspn(path, "/");
    how.resolve = 0;
    if (!*path) path = ".";
#endif
    int fd, tries = 100; // EAGAIN: there is a ".." on the way, and something was renamed or mounted meanwhile, anywhere
    do fd = syscall(SYS_openat2, root, path, &how, sizeof how);
    while (fd < 0 && errno == EAGAIN && --tries);
    return fd;
}

// Opens the directory that holds `path` and points at the last name.
static int open_parent(const char *path, const char **name, bool make) {
    static char copy[4096];
    size_t length = strlen(path);
    if (*path != '/') return errno = EINVAL, -1; // below, a name without a slash before it would have no end
    while (length > 1 && path[length - 1] == '/') length--;
    if (length >= sizeof copy) return errno = ENAMETOOLONG, -1;
    memcpy(copy, path, length);
    copy[length] = 0;
    char *slash = strrchr(copy, '/');
    if (!slash || !slash[1]) return errno = EINVAL, -1;
    *name = slash + 1;
    if (!strcmp(*name, "..") || !strcmp(*name, ".")) return errno = EINVAL, -1;
    static char parent[4096];
    size_t head = slash == copy ? 1 : (size_t)(slash - copy);
    memcpy(parent, copy, head);
    parent[head] = 0;
    int fd = open_path(parent, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0 || errno != ENOENT || !make) return fd;
    // Parents are made one by one, each looked up again from the root: no name is trusted to stay what it was.
    char part[4096];
    for (size_t i = 1; i <= head; i++) {
        if (i < head && parent[i] != '/') continue;
        memcpy(part, parent, i);
        part[i] = 0;
        int here = open_path(part, O_PATH | O_DIRECTORY, 0);
        if (here < 0 && errno == ENOENT) {
            char *cut = strrchr(part, '/');
            const char *last = cut + 1;
            char above[4096] = "/";
            if (cut != part) memcpy(above, part, cut - part), above[cut - part] = 0;
            int up = open_path(above, O_PATH | O_DIRECTORY, 0);
            if (up < 0) return -1;
            int made = mkdirat(up, last, 0755);
            int error = errno;
            if (!made) give(up, last);
            close(up);
            if (made && error != EEXIST) return errno = error, -1;
        } else if (here < 0) {
            return -1;
        } else {
            close(here);
        }
    }
    return open_path(parent, O_PATH | O_DIRECTORY, 0);
}

// Appends one text to a payload, as far as there is room for it.
static int put(char *payload, int length, int room, const char *text) {
    size_t size = strlen(text) + 1;
    if (length + (int)size > room) size = 1, text = "";
    memcpy(payload + length, text, size);
    return length + size;
}

// An entry by the directory it is in. What follows its target: what a link leads to, names of owner and group, `user.` attributes.
static void send_entry(uint32_t id, const struct stat *st, const char *path, int directory, const char *name) {
    char payload[32768], target[4096] = "", place[4200];
    struct __attribute__((packed)) {
        uint32_t mode, uid, gid;
        uint64_t size;
        int64_t mtime;
    } head = {st->st_mode, st->st_uid, st->st_gid, st->st_size, st->st_mtim.tv_sec * 1000000000LL + st->st_mtim.tv_nsec};
    memcpy(payload, &head, sizeof head);
    const int room = sizeof payload - 16;
    struct stat led = {0};
    int length = put(payload, sizeof head, room, path);
    bool link = S_ISLNK(st->st_mode);
    if (link) {
        ssize_t size = readlinkat(directory, name, target, sizeof target - 1);
        target[size < 0 ? 0 : size] = 0;
    }
    length = put(payload, length, room, target);
    *target = 0;
    if (link && !rooted) { // on tier process the kernel would look for it on the host
        int fd = openat(directory, name, O_PATH | O_CLOEXEC);
        if (fd >= 0 && !fstat(fd, &led)) {
            snprintf(place, sizeof place, "/proc/self/fd/%d", fd);
            ssize_t size = readlink(place, target, sizeof target - 1);
            target[size < 0 ? 0 : size] = 0;
        }
        if (fd >= 0) close(fd);
    }
    memcpy(payload + length, &(uint32_t){led.st_mode}, 4);
    length = put(payload, length + 4, room, target);
    length = put(payload, length, room, name_of(st->st_uid, false));
    length = put(payload, length, room, name_of(st->st_gid, true));
    char marks[8192];
    ssize_t listed = 0;
    if (S_ISREG(st->st_mode) || S_ISDIR(st->st_mode)) {
        snprintf(place, sizeof place, "/proc/self/fd/%d/%s", directory, name);
        listed = llistxattr(place, marks, sizeof marks);
    }
    for (const char *mark = marks; listed > 0 && mark < marks + listed; mark += strlen(mark) + 1) {
        char value[4097];
        if (strncmp(mark, "user.", 5)) continue;
        ssize_t size = lgetxattr(place, mark, value, sizeof value - 1);
        if (size < 0 || memchr(value, 0, size) || length + (int)(strlen(mark) + size) + 2 > room) continue;
        value[size] = 0;
        length = put(payload, length, room, mark);
        length = put(payload, length, room, value);
    }
    send_frame(id, ENTRY, payload, length);
}

// Sets `user.` attributes of a file to these (text by text: name, value) and removes others below `prefix`.
static int set_attributes(int fd, struct request *request) {
    const char *prefix = take_str(request), *pairs = request->at;
    char marks[8192];
    ssize_t listed = flistxattr(fd, marks, sizeof marks);
    for (const char *mark = marks; listed > 0 && mark < marks + listed; mark += strlen(mark) + 1)
        if (!request->bad && *prefix && !strncmp(mark, prefix, strlen(prefix))) fremovexattr(fd, mark);
    request->at = pairs;
    while (!request->bad && request->at < request->end) {
        const char *name = take_str(request), *value = take_str(request);
        if (request->bad || strncmp(name, "user.", 5)) return errno = EINVAL, -1;
        if (fsetxattr(fd, name, value, strlen(value), 0)) return -1;
    }
    return 0;
}

static int list_tree(uint32_t id, int fd, const char *prefix, uint32_t depth, int level) {
    DIR *directory = fdopendir(fd);
    if (!directory) return close(fd), -1;
    struct dirent *entry;
    while ((entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        struct stat st;
        if (fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue; // gone meanwhile
        char path[4096];
        if (snprintf(path, sizeof path, "%s%s%s", prefix, *prefix ? "/" : "", entry->d_name) >= (int)sizeof path) continue;
        send_entry(id, &st, path, fd, entry->d_name);
        if (S_ISDIR(st.st_mode) && depth > 1 && level < TREE_DEPTH) {
            int below = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (below >= 0) list_tree(id, below, path, depth - 1, level + 1);
        }
    }
    closedir(directory);
    return 0;
}

static int remove_tree(int parent, const char *name, int level) {
    if (!unlinkat(parent, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    DIR *directory = level < TREE_DEPTH ? fdopendir(fd) : NULL;
    if (!directory) return close(fd), errno = ELOOP, -1;
    struct dirent *entry;
    int failed = 0;
    while (!failed && (entry = readdir(directory)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) failed = remove_tree(fd, entry->d_name, level + 1);
    int error = errno;
    closedir(directory);
    if (failed) return errno = error, -1;
    return unlinkat(parent, name, AT_REMOVEDIR);
}

// ---- conversations ----

static struct talk *find_talk(uint32_t id) {
    for (struct talk *talk = talks; talk; talk = talk->next)
        if (talk->id == id && !talk->drain) return talk;
    return NULL;
}

static struct talk *new_talk(uint32_t id, int kind) {
    struct talk *talk = calloc(1, sizeof *talk);
    if (!talk) return NULL;
    *talk = (struct talk){.next = talks, .id = id, .kind = kind, .in = -1, .out = -1, .err = -1, .window = WINDOW_START, .left = -1};
    return talks = talk;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

// Most commands are over at once: how one began, what it printed and how it ended then cost one wakeup of everybody on the way.
static void uncork(struct talk *talk) {
    if (!talk->cork) return;
    if (talk->held) send_all(&(struct iovec){talk->cork, talk->held}, 1);
    free(talk->cork);
    talk->cork = NULL;
    corks--;
}

static void say(struct talk *talk, uint32_t kind, const void *payload, uint32_t length) {
    struct frame frame = {length, talk->id, kind};
    if (talk->cork && talk->held + sizeof frame + length > CORK_MAX) uncork(talk);
    if (!talk->cork) {
        send_frame(talk->id, kind, payload, length);
        return;
    }
    memcpy(talk->cork + talk->held, &frame, sizeof frame);
    memcpy(talk->cork + talk->held + sizeof frame, payload, length);
    talk->held += sizeof frame + length;
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

// Whether a process has something to do: one that had no turn yet is not one that takes its time.
static bool is_busy(pid_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (length <= 0) return false;
    text[length] = 0;
    char *after = strrchr(text, ')');
    return after && (after[2] == 'R' || after[2] == 'D');
}

// Sends what has waited long enough; milliseconds until the next has, -1 if none waits.
static int uncork_late(void) {
    int64_t next = -1, at = corks ? now() : 0;
    for (struct talk *talk = corks ? talks : NULL; talk; talk = talk->next) {
        if (talk->cork && talk->uncork_at <= at) {
            int64_t waited = at - talk->corked_at;
            if (waited < CORK_MS && is_busy(talk->pid)) talk->uncork_at = at + 2 * waited + 1;
            else uncork(talk);
        }
        if (talk->cork && (next < 0 || talk->uncork_at - at < next)) next = talk->uncork_at - at;
    }
    return next;
}

static void end_talk(struct talk *talk) {
    uncork(talk);
    for (struct talk **link = &talks; *link; link = &(*link)->next)
        if (*link == talk) {
            *link = talk->next;
            break;
        }
    if (talk->in == talk->out) talk->in = -1;
    close_fd(&talk->in);
    close_fd(&talk->out);
    close_fd(&talk->err);
    for (int i = 0; i < talk->watches; i++) free(talk->watched[i]);
    free(talk->watched);
    free(talk->queue);
    free(talk);
}

// What epoll reports: an fd of a conversation, found again by its number, so that nothing freed is ever touched.
static void watch_fd(int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event) && errno == ENOENT) epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static void update_interest(struct talk *talk) {
    bool open = talk->window > 0 || talk->drain;
    if (talk->out >= 0 && talk->kind != READING && talk->kind != WATCHING) {
        uint32_t events = open && !talk->muted_out ? EPOLLIN : 0;
        if (talk->in == talk->out && talk->queued) events |= EPOLLOUT;
        if (events) watch_fd(talk->out, events);
        else epoll_ctl(poller, EPOLL_CTL_DEL, talk->out, NULL);
    }
    if (talk->err >= 0) {
        if (open) watch_fd(talk->err, EPOLLIN);
        else epoll_ctl(poller, EPOLL_CTL_DEL, talk->err, NULL);
    }
    if (talk->in >= 0 && talk->in != talk->out && talk->kind != WRITING) {
        if (talk->queued) watch_fd(talk->in, EPOLLOUT);
        else epoll_ctl(poller, EPOLL_CTL_DEL, talk->in, NULL);
    }
}

static void finish_command(struct talk *talk) {
    struct __attribute__((packed)) {
        int32_t status;
        uint64_t user, system, resident;
    } end = {talk->status, talk->usage.ru_utime.tv_sec * 1000000ULL + talk->usage.ru_utime.tv_usec,
             talk->usage.ru_stime.tv_sec * 1000000ULL + talk->usage.ru_stime.tv_usec, talk->usage.ru_maxrss * 1024ULL};
    say(talk, EXIT, &end, sizeof end);
    uncork(talk);
    close_fd(talk->in == talk->out ? &(int){-1} : &talk->in);
    if (talk->out < 0 && talk->err < 0) {
        end_talk(talk);
        return;
    }
    // Something in the background still holds the output: read it away, so that it neither blocks nor dies of SIGPIPE.
    talk->drain = true;
    talk->queued = 0;
    talk->muted_out = talk->muted_err = false;
    update_interest(talk);
}

// Reads what is there from one output. Returns false when it is at its end.
static bool pump(struct talk *talk, int fd, uint32_t kind) {
    char chunk[CHUNK];
    size_t want = talk->drain || talk->window > CHUNK ? CHUNK : (size_t)talk->window;
    if (!want) return true;
    if (talk->left >= 0 && (int64_t)want > talk->left) want = talk->left;
    ssize_t got = read(fd, chunk, want);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) return false; // a terminal says EIO when its last user is gone
    if (!talk->drain) {
        talk->window -= got;
        if (talk->left >= 0) talk->left -= got;
        say(talk, kind, chunk, got);
    }
    return true;
}

static void close_output(struct talk *talk, int *fd) {
    epoll_ctl(poller, EPOLL_CTL_DEL, *fd, NULL);
    if (*fd == talk->in) talk->in = -1;
    close_fd(fd);
}

static bool has_input(int fd) {
    return fd >= 0 && poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 0) > 0;
}

// A command is over when it has exited and what it wrote before that has been sent.
static void settle(struct talk *talk) {
    if (talk->kind != COMMAND || !talk->exited || talk->drain) return;
    while (talk->window > 0 && has_input(talk->out))
        if (!pump(talk, talk->out, STDOUT)) close_output(talk, &talk->out);
    while (talk->window > 0 && has_input(talk->err))
        if (!pump(talk, talk->err, STDERR)) close_output(talk, &talk->err);
    if (has_input(talk->out) || has_input(talk->err)) return update_interest(talk); // the host's window is full
    finish_command(talk);
}

static void feed(struct talk *talk) {
    size_t written = 0;
    while (written < talk->queued) {
        ssize_t sent = write(talk->in, talk->queue + written, talk->queued - written);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) { // nobody reads any more
            written = talk->queued;
            talk->input_end = true;
            break;
        }
        written += sent;
    }
    if (written) {
        memmove(talk->queue, talk->queue + written, talk->queued - written);
        talk->queued -= written;
        uint32_t credit = written;
        send_frame(talk->id, CREDIT, &credit, sizeof credit);
    }
    if (!talk->queued && talk->input_end) {
        if (talk->kind == CONNECTION) shutdown(talk->in, SHUT_WR);
        else if (talk->in != talk->out) {
            epoll_ctl(poller, EPOLL_CTL_DEL, talk->in, NULL);
            close_fd(&talk->in);
        } else if (write(talk->in, "\4", 1) < 0) { // a terminal ends its input by Ctrl-D
        }
        talk->input_end = false;
    }
    update_interest(talk);
}

// ---- commands ----

struct start { // what the vforked child needs, prepared before it runs
    char *const *argv, *const *envp;
    const char *path, *cwd;
    int stdio[3], cwd_fd;
    bool pty, switch_user;
    uid_t uid;
    gid_t gid;
    volatile int error, where;
};

static void child(struct start *start) {
    sigset_t none;
    sigemptyset(&none);
    for (int i = 1; i < 32; i++) signal(i, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    for (int i = 0; i < 3; i++)
        if (dup2(start->stdio[i], i) < 0) goto failed;
    if (start->pty) ioctl(0, TIOCSCTTY, 0);
    syscall(SYS_close_range, 3, ~0U, 0);
    if (start->switch_user && (syscall(SYS_setgroups, 0, NULL) || syscall(SYS_setresgid, start->gid, start->gid, start->gid) ||
                               syscall(SYS_setresuid, start->uid, start->uid, start->uid)))
        goto failed;
    start->where = 1;
    if (chdir(start->cwd)) goto failed;
    start->where = 2;
    if (strchr(start->argv[0], '/')) {
        execve(start->argv[0], start->argv, start->envp);
    } else {
        int seen = ENOENT;
        for (const char *from = start->path; from;) {
            const char *colon = strchr(from, ':');
            size_t length = colon ? (size_t)(colon - from) : strlen(from);
            char full[4096];
            if (length + strlen(start->argv[0]) + 2 < sizeof full) {
                memcpy(full, from, length);
                full[length] = '/';
                strcpy(full + length + 1, start->argv[0]);
                execve(full, start->argv, start->envp);
                if (errno != ENOENT && errno != ENOTDIR) seen = errno;
            }
            from = colon ? colon + 1 : NULL;
        }
        errno = seen;
    }
failed:
    start->error = errno;
    _exit(127);
}

// In a function of its own: vfork shares our memory, and no local of the caller may be at stake.
static __attribute__((noinline)) pid_t launch(struct start *start) {
    pid_t pid = vfork();
    if (pid == 0) child(start);
    return pid;
}

static int open_terminal(uint32_t rows, uint32_t columns, int *slave) {
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0) return -1;
    char name[64];
    if (grantpt(master) || unlockpt(master) || ptsname_r(master, name, sizeof name)) return close(master), -1;
    *slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*slave < 0) return close(master), -1;
    ioctl(master, TIOCSWINSZ, &(struct winsize){.ws_row = rows, .ws_col = columns});
    return master;
}

static void run(uint32_t id, struct request *request) {
    uint32_t flags = take_u32(request), rows = take_u32(request), columns = take_u32(request);
    const char *name = take_str(request), *cwd = take_str(request);
    uint32_t argc = take_u32(request);
    if (argc == 0 || argc > REQUEST_MAX / 2) request->bad = true;
    char **argv = request->bad ? NULL : calloc(argc + 1, sizeof *argv);
    for (uint32_t i = 0; argv && i < argc && !request->bad; i++) argv[i] = (char *)take_str(request);
    uint32_t envc = take_u32(request);
    if (envc > REQUEST_MAX / 2) request->bad = true;
    char **envp = request->bad ? NULL : calloc(envc + 4, sizeof *envp);
    for (uint32_t i = 0; envp && i < envc && !request->bad; i++) envp[i] = (char *)take_str(request);
    int pipes[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}}, null = -1, slave = -1;
    struct talk *talk = NULL;
    const char *problem = "the request is broken";
    char home[300], who[80], logname[80];
    errno = EINVAL;
    if (request->bad || !argv || !envp) goto failed;
    struct user user;
    if (find_user(name, &user)) {
        send_done(id, errno | 3 << 16, name);
        errno = 0;
        goto failed;
    }

    // HOME and USER follow the user unless the caller said otherwise; "~" as cwd is the user's home.
    bool has_home = false, has_user = false, has_logname = false;
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    for (uint32_t i = 0; i < envc; i++) {
        if (!strncmp(envp[i], "PATH=", 5)) path = envp[i] + 5;
        has_home |= !strncmp(envp[i], "HOME=", 5);
        has_user |= !strncmp(envp[i], "USER=", 5);
        has_logname |= !strncmp(envp[i], "LOGNAME=", 8);
    }
    snprintf(home, sizeof home, "HOME=%s", user.home);
    snprintf(who, sizeof who, "USER=%s", user.name);
    if (!has_home) envp[envc++] = home;
    snprintf(logname, sizeof logname, "LOGNAME=%s", user.name);
    if (!has_user) envp[envc++] = who;
    if (!has_logname) envp[envc++] = logname;
    if (!*cwd || !strcmp(cwd, "~")) cwd = user.home;
    static char full_cwd[4096];
    if (rooted) { // the box's "/" is a directory of the host: the working directory is looked up in it
        int fd = open_path(cwd, O_PATH | O_DIRECTORY, 0);
        problem = cwd;
        if (fd < 0) goto failed;
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, full_cwd, sizeof full_cwd - 1);
        close(fd);
        if (length < 0) goto failed;
        full_cwd[length] = 0;
        cwd = full_cwd;
    }

    problem = "no room for another command";
    if (!(talk = new_talk(id, COMMAND))) goto failed;
    struct start start = {.argv = argv, .envp = envp, .path = path, .cwd = cwd, .switch_user = !rooted, .uid = user.uid, .gid = user.gid};
    if (flags & EXEC_PTY) {
        problem = "no terminal to be had";
        talk->out = talk->in = open_terminal(rows, columns, &slave);
        if (talk->out < 0) goto failed;
        if (!rooted && fchown(slave, user.uid, -1)) goto failed;
        start.stdio[0] = start.stdio[1] = start.stdio[2] = slave;
        start.pty = true;
    } else {
        if (flags & EXEC_STDIN) {
            if (pipe2(pipes[0], O_CLOEXEC)) goto failed;
        } else if ((null = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) goto failed;
        if (pipe2(pipes[1], O_CLOEXEC) || pipe2(pipes[2], O_CLOEXEC)) goto failed;
        start.stdio[0] = flags & EXEC_STDIN ? pipes[0][0] : null;
        start.stdio[1] = pipes[1][1];
        start.stdio[2] = pipes[2][1];
        // The child's own ends must not be 0-2 themselves, or dup2 would close one that is still needed.
        for (int i = 0; i < 3; i++)
            if (start.stdio[i] < 3) goto failed;
        talk->in = pipes[0][1];
        talk->out = pipes[1][0];
        talk->err = pipes[2][0];
        pipes[0][1] = pipes[1][0] = pipes[2][0] = -1;
        // A command whose owner is another user may reopen its own stdout through /proc or /dev/stdout.
        if (!rooted && user.uid)
            for (int i = 0; i < 3; i++)
                if (fchown(start.stdio[i], user.uid, user.gid)) {}
    }
    pid_t pid = launch(&start);
    problem = "no process to be had";
    if (pid < 0) goto failed;
    if (start.error) {
        errno = start.error;
        problem = start.where == 1 ? cwd : start.where == 2 ? argv[0] : "the command could not be set up";
        waitpid(pid, NULL, 0);
        send_done(id, errno | start.where << 16, problem);
        errno = 0;
        goto failed;
    }
    for (int *fd = (int[]){talk->in, talk->out, talk->err}, i = 0; i < 3; i++)
        if (fd[i] >= 0) fcntl(fd[i], F_SETFL, fcntl(fd[i], F_GETFL) | O_NONBLOCK);
    talk->pid = pid;
    uint32_t number = pid;
    if (flags & EXEC_CORK && (talk->cork = malloc(CORK_MAX))) {
        talk->corked_at = now();
        talk->uncork_at = talk->corked_at + 4;
        corks++;
    }
    say(talk, STARTED, &number, sizeof number);
    update_interest(talk);
    talk = NULL;
    errno = 0;
failed:
    if (errno) send_done(id, errno, problem);
    if (talk) end_talk(talk);
    for (int i = 0; i < 3; i++)
        for (int end = 0; end < 2; end++) close_fd(&pipes[i][end]);
    close_fd(&null);
    close_fd(&slave);
    free(argv);
    free(envp);
}

// Ends a command and all that came of it: its session, its descendants, and what those left behind while we looked.
static void kill_tree(pid_t leader, int signal_number) {
    for (int round = 0; round < 8; round++) {
        DIR *proc = opendir("/proc");
        if (!proc) break;
        struct { pid_t pid, parent, session; bool doomed; } seen[4096];
        int count = 0, doomed = 0;
        struct dirent *entry;
        while ((entry = readdir(proc)) && count < 4096) {
            if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
            char path[300], text[512];
            snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            if (fd < 0) continue;
            ssize_t length = read(fd, text, sizeof text - 1);
            close(fd);
            if (length <= 0) continue;
            text[length] = 0;
            char *after = strrchr(text, ')'), state;
            int parent, group, session;
            if (!after || sscanf(after + 1, " %c %d %d %d", &state, &parent, &group, &session) != 4 || state == 'Z') continue;
            pid_t pid = atoi(entry->d_name);
            seen[count++] = (typeof(seen[0])){pid, parent, session, (pid == leader || session == leader) && pid != getpid()};
        }
        closedir(proc);
        for (bool more = true; more;) {
            more = false;
            for (int i = 0; i < count; i++)
                for (int j = 0; j < count && !seen[i].doomed; j++)
                    if (seen[j].doomed && seen[i].parent == seen[j].pid && seen[i].pid != getpid()) seen[i].doomed = more = true;
        }
        for (int i = 0; i < count; i++)
            if (seen[i].doomed) doomed++, kill(seen[i].pid, signal_number);
        if (!doomed || signal_number != SIGKILL) break;
    }
    kill(-leader, signal_number);
}

static void reap(void) {
    int status;
    struct rusage usage;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0)
        for (struct talk *talk = talks; talk; talk = talk->next)
            if (talk->kind == COMMAND && talk->pid == pid && !talk->exited) {
                talk->exited = true;
                talk->status = status;
                talk->usage = usage;
                settle(talk);
                break;
            }
}

// ---- the rest of the requests ----

static void send_event(struct talk *talk, uint32_t mask, const char *name) {
    char payload[4 + 4096];
    memcpy(payload, &mask, 4);
    int length = snprintf(payload + 4, 4096, "%s", name);
    if (length < 4096) send_frame(talk->id, EVENT, payload, 4 + length + 1);
}

// `late`: the directory is new, and what it already holds came before its watch; it is told of as if it came now.
static void add_watch(struct talk *talk, const char *path, const char *name, int level, bool late) {
    uint32_t mask = IN_CREATE | IN_DELETE | IN_MODIFY | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_CLOSE_WRITE | IN_ONLYDIR;
    if (!*name) mask |= IN_DELETE_SELF | IN_MOVE_SELF; // of those below, the directory above tells
    int fd = open_path(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int number = inotify_add_watch(talk->out, link, mask);
    if (number >= 0 && number < 65536) {
        if (number >= talk->watches) {
            char **more = realloc(talk->watched, (number + 1) * sizeof *more);
            if (!more) { close(fd); return; }
            memset(more + talk->watches, 0, (number + 1 - talk->watches) * sizeof *more);
            talk->watched = more;
            talk->watches = number + 1;
        }
        free(talk->watched[number]);
        talk->watched[number] = strdup(name);
    }
    // Opened anew to be read: btrfs does not show through a descriptor what came after it, and that may be before the watch.
    int again = talk->recursive && level < TREE_DEPTH ? openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    close(fd);
    DIR *directory = again >= 0 ? fdopendir(again) : NULL;
    if (!directory) {
        if (again >= 0) close(again);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || (entry->d_type != DT_DIR && !late)) continue;
        char below[4096], below_name[4096];
        if (snprintf(below, sizeof below, "%s/%s", path, entry->d_name) >= (int)sizeof below) continue;
        if (snprintf(below_name, sizeof below_name, "%s%s%s", name, *name ? "/" : "", entry->d_name) >= (int)sizeof below_name) continue;
        if (late) send_event(talk, IN_CREATE, below_name);
        if (entry->d_type == DT_DIR) add_watch(talk, below, below_name, level + 1, late);
    }
    closedir(directory);
}

static void watch_events(struct talk *talk) {
    char buffer[16384] __attribute__((aligned(8)));
    ssize_t got = read(talk->out, buffer, sizeof buffer);
    for (char *at = buffer; got > 0 && at < buffer + got;) {
        struct inotify_event *event = (void *)at;
        at += sizeof *event + event->len;
        const char *base = event->wd >= 0 && event->wd < talk->watches && talk->watched[event->wd] ? talk->watched[event->wd] : "";
        if (*base && !event->len) continue; // a directory below, of which the one above tells
        char name[4096];
        if (snprintf(name, sizeof name, "%s%s%s", base, *base ? "/" : "", event->len ? event->name : "") >= (int)sizeof name) continue;
        send_event(talk, event->mask, name);
        if (talk->recursive && event->mask & IN_ISDIR && event->mask & (IN_CREATE | IN_MOVED_TO)) {
            char path[8300];
            snprintf(path, sizeof path, "%s/%s", talk->queue, name);
            if (strlen(path) < 4096) add_watch(talk, path, name, 0, event->mask & IN_CREATE);
        }
    }
}

// Never waits: a server of the box's that does not accept would hold everything else up.
static int connect_loopback(int family, uint32_t port, int *error) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool done = fd >= 0 && !(family == AF_INET ? connect(fd, (void *)&four, sizeof four) : connect(fd, (void *)&six, sizeof six));
    *error = done ? 0 : errno;
    if (!done && *error == EINPROGRESS) { // over loopback this is answered at once, or not at all
        socklen_t size = sizeof *error;
        if (poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 200) <= 0) *error = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, error, &size)) *error = errno;
    }
    if (!*error) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

static void connect_port(uint32_t id, uint32_t port) {
    int error = 0, fd = connect_loopback(AF_INET, port, &error);
    if (error == ECONNREFUSED) { // a server that listens on ::1 only
        int other = 0;
        fd = connect_loopback(AF_INET6, port, &other);
        if (!other) error = 0;
    }
    struct talk *talk = error ? NULL : new_talk(id, CONNECTION);
    if (!talk) {
        if (fd >= 0) close(fd);
        send_done(id, error ? error : ENOMEM, "connect");
        return;
    }
    talk->in = talk->out = fd;
    send_frame(id, STARTED, &(uint32_t){0}, 4);
    update_interest(talk);
}

static void set_clock(struct request *request) {
    int64_t now = 0;
    if (request->end - request->at < 8) return;
    memcpy(&now, request->at, 8);
    request->at += 8;
    const char *hostname = take_str(request);
    if (request->bad) return;
    clock_settime(CLOCK_REALTIME, &(struct timespec){now / 1000000000, now % 1000000000});
    if (*hostname && sethostname(hostname, strlen(hostname))) {}
    // Restored twins must not share their randomness.
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        struct { int bits, size; char bytes[256]; } entropy = {0};
        entropy.size = request->end - request->at > 256 ? 256 : request->end - request->at;
        entropy.bits = entropy.size * 8;
        memcpy(entropy.bytes, request->at, entropy.size);
        ioctl(fd, _IOW('R', 0x03, int[2]) /* RNDADDENTROPY */, &entropy);
        ioctl(fd, _IO('R', 0x07) /* RNDRESEEDCRNG */);
        close(fd);
    }
}

// The pieces of a request that is larger than a frame; the host sends them one after another.
static char *held;
static size_t held_length;

static void hold(const char *payload, uint32_t length) {
    char *more = held_length + length > REQUEST_MAX ? NULL : realloc(held, held_length + length + FRAME_MAX);
    if (more) memcpy(more + held_length, payload, length);
    else free(held); // no half of a command is ever run
    held = more;
    held_length = more ? held_length + length : REQUEST_MAX;
}

static void handle(uint32_t id, uint32_t kind, const char *payload, uint32_t length) {
    if (kind == MORE) {
        hold(payload, length);
        return;
    }
    if (kind == EXEC && held_length) {
        if (held) {
            memcpy(held + held_length, payload, length); // there is room for a frame
            struct request request = {held, held + held_length + length, false};
            run(id, &request);
        } else {
            send_done(id, ENOMEM, "a command so long");
        }
        free(held);
        held = NULL;
        held_length = 0;
        return;
    }
    struct request request = {payload, payload + length, false};
    struct talk *talk = find_talk(id);
    const char *what = "", *name, *user, *path, *other;
    int fd, failed = 0;
    struct stat st;
    switch (kind) {
    case EXEC:
        run(id, &request);
        return;
    case INPUT:
        if (!talk) return;
        if (talk->kind == WRITING) {
            for (uint32_t done = 0; done < length && !talk->status;) {
                ssize_t sent = write(talk->in, payload + done, length - done);
                if (sent < 0 && errno != EINTR) talk->status = errno;
                else if (sent > 0) done += sent;
            }
            send_frame(id, CREDIT, &length, sizeof length);
            return;
        }
        if (talk->in < 0 || talk->input_end) {
            send_frame(id, CREDIT, &length, sizeof length);
            return;
        }
        if (talk->queued + length > talk->room) {
            size_t room = talk->queued + length + CHUNK;
            char *more = room > WINDOW_START + FRAME_MAX ? NULL : realloc(talk->queue, room);
            if (!more) return; // beyond the window: the host broke the protocol
            talk->queue = more;
            talk->room = room;
        }
        if (length) memcpy(talk->queue + talk->queued, payload, length); // of nothing there may be no queue at all
        talk->queued += length;
        feed(talk);
        return;
    case INPUT_END:
        if (!talk) return;
        if (talk->kind == WRITING) {
            int error = talk->status;
            struct request marks = {talk->queue, talk->queue + talk->room, false};
            if (!error && talk->queue && set_attributes(talk->in, &marks)) error = errno;
            if (close(talk->in) && !error) error = errno; // a full disk may show only here
            talk->in = -1;
            end_talk(talk);
            send_done(id, error, "write");
        } else if (talk->in >= 0) {
            talk->input_end = true;
            feed(talk);
        }
        return;
    case SIGNAL: {
        int number = take_u32(&request);
        uint32_t tree = take_u32(&request);
        if (!talk || talk->kind != COMMAND || request.bad || number < 1 || number > 64) return;
        if (tree) kill_tree(talk->pid, number);
        else if (!talk->exited) kill(-talk->pid, number);
        return;
    }
    case RESIZE: {
        struct winsize size = {.ws_row = take_u32(&request), .ws_col = take_u32(&request)};
        if (talk && talk->kind == COMMAND && talk->in == talk->out && talk->out >= 0 && !request.bad) ioctl(talk->out, TIOCSWINSZ, &size);
        return;
    }
    case WINDOW:
        if (!talk) return;
        talk->window += take_u32(&request);
        if (talk->exited) settle(talk);
        else update_interest(talk);
        return;
    case CANCEL:
        if (!talk) return;
        if (talk->kind == COMMAND) kill_tree(talk->pid, SIGKILL);
        else end_talk(talk);
        return;
    case PING:
        send_frame(id, PONG, payload, length);
        return;
    case CLOCK:
        set_clock(&request);
        send_done(id, 0, "");
        return;
    case PROCESSES:
        for (talk = talks; talk; talk = talk->next)
            if (talk->kind == COMMAND && !talk->drain) send_frame(id, PROCESS, (uint32_t[]){talk->id, talk->pid}, 8);
        send_done(id, 0, "");
        return;
    case WHO: {
        struct user found;
        char person[8 + sizeof found.name + sizeof found.home];
        user = take_str(&request);
        errno = EINVAL;
        if (request.bad || find_user(user, &found)) {
            send_done(id, errno, user);
            return;
        }
        memcpy(person, (uint32_t[]){found.uid, found.gid}, 8);
        int size = put(person, 8, sizeof person, found.name);
        send_frame(id, PERSON, person, put(person, size, sizeof person, found.home));
        send_done(id, 0, "");
        return;
    }
    case CONNECT: {
        uint32_t port = take_u32(&request);
        if (request.bad || port < 1 || port > 65535) send_done(id, EINVAL, "port");
        else connect_port(id, port);
        return;
    }
    }

    // Files: the user's rights, then one or two paths.
    uint32_t number = kind == WRITE || kind == LIST || kind == MKDIR || kind == CHMOD || kind == WATCH ? take_u32(&request) : 0;
    uint32_t flags = kind == WRITE ? take_u32(&request) : 0;
    user = take_str(&request);
    what = path = take_str(&request);
    other = kind == MOVE || kind == LINK ? take_str(&request) : "";
    if (request.bad || kind < READ || kind > WATCH || talk) {
        send_done(id, EINVAL, "the request is broken");
        return;
    }
    errno = 0;
    named = 0;
    if (act_as(user)) {
        become_root();
        send_done(id, errno | 3 << 16, user);
        return;
    }
    switch (kind) {
    case READ: {
        fd = open_path(path, O_RDONLY | O_NONBLOCK, 0); // never waits for the other end of a FIFO
        failed = fd < 0 || fstat(fd, &st);
        if (!failed && !S_ISREG(st.st_mode)) failed = 1, errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        talk = failed ? NULL : new_talk(id, READING);
        if (talk) {
            talk->out = fd;
            if (request.end - request.at >= 16) { // a part of it
                int64_t part[2];
                memcpy(part, request.at, sizeof part);
                talk->left = part[1] < 0 ? 0 : part[1];
                if (lseek(fd, part[0] < 0 ? 0 : part[0], SEEK_SET) < 0) talk->left = 0;
            }
            become_root();
            return; // the loop pumps it as the window allows
        }
        if (fd >= 0) close(fd);
        failed = 1;
        break;
    }
    case WRITE: {
        int parent = open_parent(path, &name, flags & WRITE_PARENTS);
        const int how = O_WRONLY | O_CREAT | O_NONBLOCK | (flags & WRITE_APPEND ? O_APPEND : 0);
        fd = parent < 0 ? -1 : open_path(path, how | O_EXCL, number & 07777);
        bool made = fd >= 0;
        if (parent >= 0 && fd < 0 && errno == EEXIST) fd = open_path(path, how, number & 07777);
        if (parent >= 0) close(parent);
        failed = fd < 0 || fstat(fd, &st);
        if (!failed && !S_ISREG(st.st_mode)) failed = 1, errno = EINVAL; // a FIFO or a device where a file should be
        if (!failed && owned && fchown(fd, owner.uid, owner.gid)) {}
        if (!failed && !made && !(flags & WRITE_APPEND)) failed = ftruncate(fd, 0); // of a new file it would be told as a change
        talk = failed ? NULL : new_talk(id, WRITING);
        if (talk) {
            talk->in = fd;
            if (request.at < request.end && (talk->queue = malloc(request.end - request.at))) { // its attributes, set at the end
                talk->room = request.end - request.at;
                memcpy(talk->queue, request.at, talk->room);
            }
            become_root();
            send_frame(id, STARTED, &(uint32_t){0}, 4);
            return;
        }
        if (fd >= 0) close(fd);
        failed = 1;
        break;
    }
    case LIST:
        fd = open_path(path, O_RDONLY | O_DIRECTORY, 0);
        failed = fd < 0 || list_tree(id, fd, "", number ? number : 1, 0);
        break;
    case STAT: {
        if (!strcmp(path, "/")) {
            fd = open_path("/", O_PATH, 0);
            failed = fd < 0 || fstat(fd, &st);
            if (!failed) send_entry(id, &st, path, fd, ".");
            if (fd >= 0) close(fd);
            break;
        }
        int parent = open_parent(path, &name, false);
        failed = parent < 0 || fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW);
        if (!failed) send_entry(id, &st, path, parent, name);
        if (parent >= 0) close(parent);
        break;
    }
    case MOVE: {
        char last[256];
        int from = open_parent(path, &name, false);
        failed = from < 0 || strlen(name) >= sizeof last;
        if (!failed) {
            strcpy(last, name); // open_parent's answer lies in a buffer of its own
            int to = open_parent(other, &name, true);
            failed = to < 0 || renameat(from, last, to, name);
            if (to >= 0) close(to);
        }
        if (from >= 0) close(from);
        break;
    }
    case REMOVE: {
        int parent = open_parent(path, &name, false);
        char last[256];
        failed = parent < 0 || strlen(name) >= sizeof last;
        if (!failed) {
            strcpy(last, name);
            failed = remove_tree(parent, last, 0);
        }
        if (parent >= 0) close(parent);
        break;
    }
    case MKDIR: {
        int parent = open_parent(path, &name, true);
        failed = parent < 0 || mkdirat(parent, name, number & 07777);
        if (!failed) give(parent, name);
        if (parent >= 0) close(parent);
        break;
    }
    case LINK: {
        what = other;
        int parent = open_parent(other, &name, true);
        failed = parent < 0 || symlinkat(path, parent, name);
        if (!failed) give(parent, name);
        if (parent >= 0) close(parent);
        break;
    }
    case CHMOD: { // by O_PATH: an owner may change a file that it can't read
        char link[64];
        fd = open_path(path, O_PATH, 0);
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        failed = fd < 0 || chmod(link, number & 07777);
        if (fd >= 0) close(fd);
        break;
    }
    case WATCH:
        fd = open_path(path, O_RDONLY | O_DIRECTORY, 0);
        failed = fd < 0;
        if (fd >= 0) close(fd);
        talk = failed ? NULL : new_talk(id, WATCHING);
        if (!talk) break;
        talk->out = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
        talk->recursive = number;
        talk->queue = strdup(path); // a watch has no input; its root is kept here
        if (talk->out < 0 || !talk->queue) {
            failed = 1;
            end_talk(talk);
            break;
        }
        add_watch(talk, path, "", 0, false);
        watch_fd(talk->out, EPOLLIN);
        become_root();
        send_frame(id, STARTED, &(uint32_t){0}, 4);
        return;
    }
    int error = failed ? errno ? errno : EIO : 0;
    become_root();
    send_done(id, error, what);
}

// Files are always ready, so epoll can't tell: they are read while the host has room for more.
static bool pump_files(void) {
    bool busy = false;
    for (struct talk *talk = talks, *next; talk; talk = next) {
        next = talk->next;
        if (talk->kind != READING || talk->window <= 0) continue;
        uint32_t id = talk->id;
        errno = 0;
        if (pump(talk, talk->out, STDOUT)) {
            busy |= talk->window > 0;
        } else {
            int error = errno;
            end_talk(talk);
            send_done(id, error, "read");
        }
    }
    return busy;
}

static void ready(int fd, uint32_t events) {
    struct talk *talk = talks;
    while (talk && talk->in != fd && talk->out != fd && talk->err != fd) talk = talk->next;
    if (!talk) return;
    if (talk->kind == WATCHING) {
        watch_events(talk);
        return;
    }
    if (events & EPOLLOUT && fd == talk->in) feed(talk);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && fd == talk->out) {
        if (!pump(talk, fd, STDOUT)) {
            if (talk->kind == CONNECTION) {
                uint32_t id = talk->id;
                end_talk(talk);
                send_done(id, 0, "");
                return;
            }
            // A terminal that nobody has open now: to close it would hang up on a command that still goes on.
            if (talk->in == talk->out && !talk->exited && !talk->drain) talk->muted_out = true;
            else close_output(talk, &talk->out);
        }
    } else if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && fd == talk->err) {
        if (!pump(talk, fd, STDERR)) close_output(talk, &talk->err);
    } else if (events & (EPOLLERR | EPOLLHUP) && fd == talk->in) {
        talk->queued = 0; // stdin was closed by its reader
        epoll_ctl(poller, EPOLL_CTL_DEL, fd, NULL);
        close_fd(&talk->in);
    }
    if (talk->drain) {
        if (talk->out < 0 && talk->err < 0) end_talk(talk);
        return;
    }
    if (talk->exited) settle(talk);
    else update_interest(talk);
}

static char inbox[FRAME_MAX + sizeof(struct frame)];
static size_t received;

// Returns false when the host has hung up.
static bool receive(void) {
    ssize_t got = read(control_in, inbox + received, sizeof inbox - received);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) return false;
    received += got;
    size_t at = 0;
    struct frame frame;
    while (received - at >= sizeof frame) {
        memcpy(&frame, inbox + at, sizeof frame);
        if (frame.length > FRAME_MAX) return false; // not our protocol
        if (received - at < sizeof frame + frame.length) break;
        handle(frame.id, frame.kind, inbox + at + sizeof frame, frame.length);
        at += sizeof frame + frame.length;
    }
    memmove(inbox, inbox + at, received - at);
    received -= at;
    return true;
}

int agent_main(int in, int out, int directory, bool lasting) {
    control_in = in;
    control_out = out;
    root = directory;
    rooted = directory >= 0;
    signal(SIGPIPE, SIG_IGN);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int children = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (children < 0 || poller < 0) return 71;
    watch_fd(children, EPOLLIN);
    watch_fd(control_in, EPOLLIN);
    umask(022);
#ifndef WITHOUT_UNDUMPABLE
    prctl(PR_SET_DUMPABLE, 0); // root of the box has our own id: it must not reach into our memory or take our socket
#endif
    send_frame(0, READY, &(uint32_t){1}, 4);
    for (;;) {
        bool busy = pump_files();
        struct epoll_event events[32];
        int late = uncork_late();
        int count = epoll_wait(poller, events, 32, busy ? 0 : late);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == children) {
                struct signalfd_siginfo info;
                while (read(children, &info, sizeof info) > 0) {}
                reap();
            } else if (fd == control_in) {
                if (receive()) continue;
                if (!lasting) { // the host is gone, and the box with it; on tier process no namespace ends what it ran
                    for (struct talk *talk = talks; rooted && talk; talk = talk->next)
                        if (talk->kind == COMMAND) kill_tree(talk->pid, SIGKILL);
                    return 0;
                }
                // In a VM the host may come back on the same port: forget half a frame and wait for it.
                received = 0;
                poll(NULL, 0, 20);
            } else {
                ready(fd, events[i].events);
            }
        }
    }
}
