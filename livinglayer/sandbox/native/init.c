// First process of a virtual machine: makes a plain Linux of the kernel's bare start, then becomes the guest agent.
// A second process stays outside the box's root and does on the control port what only a machine needs: mounts, identity, export of changes.
#define _GNU_SOURCE
#include "agent.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <net/route.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define LAYERS 10 // disks for layers above the base; qemu.py has the same number

static char failure[256]; // of the command being done, told to the host

static bool fail(const char *format, ...) {
    int error = errno;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(failure, sizeof failure, format, arguments);
    va_end(arguments);
    if (length < (int)sizeof failure) snprintf(failure + length, sizeof failure - length, ": %s", strerror(error));
    return false;
}

static void must(bool well, const char *what) { // before the host listens, the console is the only witness
    if (well) return;
    dprintf(2, "init: %s: %s\n", what, strerror(errno));
    reboot(RB_POWER_OFF);
    _exit(1);
}

static bool write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return false;
    ssize_t length = strlen(text);
    bool well = write(fd, text, length) == length;
    return close(fd) == 0 && well;
}

static void load_modules(void) {
    FILE *list = fopen("/modules/list", "re");
    must(list, "/modules/list");
    char name[128], path[160];
    while (fgets(name, sizeof name, list)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        must(fd >= 0 && (!syscall(SYS_finit_module, fd, "", 0) || errno == EEXIST), path);
        close(fd);
    }
    fclose(list);
}

static int open_port(const char *wanted) {
    for (int tries = 0; tries < 500; tries++) {
        for (int port = 1; port < 4; port++) {
            char path[64], name[32] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/vport0p%d/name", port);
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            if (fd < 0) continue;
            if (read(fd, name, sizeof name - 1) < 0) name[0] = 0;
            close(fd);
            name[strcspn(name, "\n")] = 0;
            if (strcmp(name, wanted)) continue;
            snprintf(path, sizeof path, "/dev/vport0p%d", port);
            if ((fd = open(path, O_RDWR | O_CLOEXEC)) >= 0) return fd;
        }
        usleep(2000);
    }
    return -1;
}

// ---- network: always the same private address; what lies behind it is the box's own namespace on the host ----

static void up(int fd, const char *name, const char *address, const char *mask) {
    struct ifreq request = {0};
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    if (address) {
        in->sin_family = AF_INET;
        inet_pton(AF_INET, address, &in->sin_addr);
        if (ioctl(fd, SIOCSIFADDR, &request)) return;
        inet_pton(AF_INET, mask, &in->sin_addr);
        ioctl(fd, SIOCSIFNETMASK, &request);
    }
    if (ioctl(fd, SIOCGIFFLAGS, &request)) return;
    request.ifr_flags |= IFF_UP;
    ioctl(fd, SIOCSIFFLAGS, &request);
}

static void network(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    up(fd, "lo", NULL, NULL);
    up(fd, "eth0", "10.0.2.15", "255.255.255.0");
    struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
    struct sockaddr_in *gateway = (struct sockaddr_in *)&route.rt_gateway;
    gateway->sin_family = route.rt_dst.sa_family = route.rt_genmask.sa_family = AF_INET;
    inet_pton(AF_INET, "10.0.2.2", &gateway->sin_addr);
    ioctl(fd, SIOCADDRT, &route); // fails without a network card: an air-gapped machine
    close(fd);
}

static void set_time(const char *nanoseconds) {
    long long now = atoll(nanoseconds);
    clock_settime(CLOCK_REALTIME, &(struct timespec){now / 1000000000, now % 1000000000});
}

// ---- the box's root ----

static bool mount_at(const char *source, const char *target, const char *kind, unsigned long flags, const char *options) {
    mkdir(target, 0755);
    return !mount(source, target, kind, flags, options) || fail("mount %s on %s", source, target);
}

// A file of ours over one of the box's, so that it does not count as a change of the box. Parents are not followed through links.
static void cover(const char *name) {
    char ours[64], theirs[64];
    snprintf(ours, sizeof ours, "/own/%s", name);
    snprintf(theirs, sizeof theirs, "/box/etc/%s", name);
    struct stat st;
    if (lstat("/box/etc", &st) || !S_ISDIR(st.st_mode)) return;
    if (!lstat(theirs, &st) && S_ISLNK(st.st_mode)) unlink(theirs); // systemd's stub resolver has no server here
    if (lstat(theirs, &st)) { // opened for writing, a file of the base would be copied up
        int fd = open(theirs, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd >= 0) close(fd);
    }
    mount(ours, theirs, NULL, MS_BIND, NULL);
}

static bool limit(const char *name, const char *value) {
    char path[64];
    snprintf(path, sizeof path, "/cgroup/box/%s", name);
    return write_file(path, value) || fail("limit %s", name);
}

static bool make_root(int layers, const char *memory) {
    char lower[LAYERS * 16 + 64] = "lowerdir=", device[16], path[16], options[LAYERS * 16 + 160];
    // The disk's inode tables are zero already: no thread need write them.
    if (!mount_at("/dev/vdb", "/upper", "ext4", MS_NOATIME, "noinit_itable,errors=remount-ro")) return false;
    mkdir("/upper/u", 0755), mkdir("/upper/w", 0755); // there already on a disk that was used before
    for (int i = 0; i < layers; i++) { // topmost first
        snprintf(device, sizeof device, "/dev/vd%c", 'c' + i);
        snprintf(path, sizeof path, "/layer%d", i);
        if (!mount_at(device, path, "erofs", MS_RDONLY, NULL)) return false;
        strcat(strcat(lower, path), ":");
    }
    snprintf(options, sizeof options, "%s/base,upperdir=/upper/u,workdir=/upper/w", lower);
    if (!mount_at("overlay", "/box", "overlay", 0, options)) return false;
    if (!mount_at("proc", "/box/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return false;
    if (!mount_at("sysfs", "/box/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return false;
    if (!mount_at("devtmpfs", "/box/dev", "devtmpfs", MS_NOSUID, "mode=755")) return false;
    if (!mount_at("devpts", "/box/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")) return false;
    snprintf(options, sizeof options, "mode=1777,size=%llu", memory ? strtoull(memory, NULL, 10) / 2 : 64ULL << 20);
    if (!mount_at("tmpfs", "/box/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options)) return false;
    unlink("/box/dev/ptmx");
    if (symlink("pts/ptmx", "/box/dev/ptmx")) {}
    static const char *const links[][2] = {{"/proc/self/fd", "/box/dev/fd"}, {"fd/0", "/box/dev/stdin"}, {"fd/1", "/box/dev/stdout"}, {"fd/2", "/box/dev/stderr"}};
    for (int i = 0; i < 4; i++)
        if (symlink(links[i][0], links[i][1])) {}
    cover("hostname"), cover("hosts"), cover("resolv.conf");
    return true;
}

// ---- export: what the box changed, as records of a tree, for a snapshot of files ----

struct __attribute__((packed)) record { // then path, link target, extended attributes, `size` bytes of content
    uint32_t mode, uid, gid, rdev;
    uint64_t size, inode;
    int64_t mtime;
    uint32_t links, path_length, target_length, attributes_length;
};

static int port; // the control port
static char buffer[65536];
static size_t filled;

static bool flush(void) {
    for (size_t sent = 0; sent < filled;) {
        ssize_t now = write(port, buffer + sent, filled - sent);
        if (now < 0 && errno != EINTR) return false;
        if (now > 0) sent += now;
    }
    filled = 0;
    return true;
}

static bool put(const void *bytes, size_t length) {
    for (const char *at = bytes; length;) {
        size_t now = sizeof buffer - filled < length ? sizeof buffer - filled : length;
        memcpy(buffer + filled, at, now);
        filled += now, at += now, length -= now;
        if (filled == sizeof buffer && !flush()) return false;
    }
    return true;
}

static bool put_entry(int parent, const char *name, const char *path, const struct stat *st) {
    char target[4096], attributes[65536];
    size_t targets = 0, length = 0;
    if (S_ISLNK(st->st_mode)) {
        ssize_t got = readlinkat(parent, name, target, sizeof target);
        if (got > 0) targets = got;
    }
    int fd = S_ISREG(st->st_mode) || S_ISDIR(st->st_mode) ? openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
    char names[4096];
    ssize_t listed = fd < 0 ? 0 : flistxattr(fd, names, sizeof names);
    for (char *at = names; listed > 0 && at < names + listed; at += strlen(at) + 1) { // name NUL u32 length value
        char value[4096];
        ssize_t got = fgetxattr(fd, at, value, sizeof value);
        size_t key = strlen(at) + 1;
        if (got < 0 || length + key + 4 + got > sizeof attributes) continue;
        memcpy(attributes + length, at, key);
        memcpy(attributes + length + key, &(uint32_t){got}, 4);
        memcpy(attributes + length + key + 4, value, got);
        length += key + 4 + got;
    }
    uint64_t size = S_ISREG(st->st_mode) ? st->st_size : 0;
    struct record record = {st->st_mode, st->st_uid, st->st_gid, st->st_rdev, size, st->st_ino,
                            st->st_mtim.tv_sec * 1000000000LL + st->st_mtim.tv_nsec, st->st_nlink, strlen(path), targets, length};
    bool well = put(&record, sizeof record) && put(path, record.path_length) && put(target, targets) && put(attributes, length);
    static char chunk[65536];
    while (well && size) { // a file that shrinks meanwhile is filled with zeros: the record's length is a promise
        ssize_t got = fd < 0 ? 0 : read(fd, chunk, size < sizeof chunk ? size : sizeof chunk);
        if (got <= 0) memset(chunk, 0, sizeof chunk), got = size < sizeof chunk ? size : sizeof chunk;
        well = put(chunk, got);
        size -= got;
    }
    if (fd >= 0) close(fd);
    return well;
}

static bool put_tree(int fd, const char *prefix) { // depth-first, a directory before what is in it
    DIR *directory = fdopendir(fd);
    if (!directory) return close(fd), true;
    struct dirent *entry;
    bool well = true;
    while (well && (entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char path[4096];
        struct stat st;
        if (fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue;
        if (snprintf(path, sizeof path, "%s%s%s", prefix, *prefix ? "/" : "", entry->d_name) >= (int)sizeof path) continue;
        well = put_entry(fd, entry->d_name, path, &st);
        int below = well && S_ISDIR(st.st_mode) ? openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (below >= 0) well = put_tree(below, path);
    }
    closedir(directory);
    return well;
}

static bool export(void) {
    sync();
    struct stat st;
    int fd = open("/upper/u", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) return fail("open the changes");
    filled = 0;
    if (!put("ok\n", 3) || !put_entry(AT_FDCWD, "/upper/u", "", &st) || !put_tree(fd, "")) return fail("export");
    struct record end = {0};
    return put(&end, sizeof end) && flush();
}

// ---- the control port: `verb key=value …\n`, answered by `ok\n` or `error …\n` ----

static bool obey(char *line, int go) {
    char *verb = strsep(&line, " "), *word;
    const char *pids = NULL, *memory = NULL;
    int layers = 0;
    while ((word = strsep(&line, " "))) {
        char *key = strsep(&word, "=");
        const char *value = word ? word : "";
        if (!strcmp(key, "time")) set_time(value);
        else if (!strcmp(key, "layers")) layers = atoi(value);
        else if (!strcmp(key, "pids")) pids = value;
        else if (!strcmp(key, "memory")) memory = value;
        else return errno = EINVAL, fail("key %s", key);
    }
    bool start = !strcmp(verb, "start");
    if (!strcmp(verb, "export")) return export();
    if (!strcmp(verb, "sync")) return sync(), true;
    if (!start && strcmp(verb, "refresh")) return errno = EINVAL, fail("verb %s", verb);
    if (layers < 0 || layers > LAYERS) return errno = EINVAL, fail("layers");
    if (start && !make_root(layers, memory)) return false;
    if ((pids && !limit("pids.max", pids)) || (memory && !limit("memory.max", memory))) return false;
    return !start || write(go, "g", 1) == 1 || fail("start");
}

static void control(int go) {
    static char line[4096];
    size_t length = 0;
    for (;;) {
        ssize_t got = read(port, line + length, sizeof line - 1 - length);
        if (got <= 0) { // nobody listens: it may be a while
            usleep(1000);
            length = 0;
            continue;
        }
        length += got;
        char *end = memchr(line, '\n', length);
        if (!end) {
            if (length == sizeof line - 1) length = 0;
            continue;
        }
        *end = 0;
        length = 0; // the host waits for an answer before it asks again
        char answer[300];
        bool export_asked = !strncmp(line, "export", 6);
        bool well = obey(line, go);
        int size = well ? snprintf(answer, sizeof answer, "ok\n") : snprintf(answer, sizeof answer, "error %s\n", failure);
        if (!(export_asked && well) && write(port, answer, size) < 0) continue;
    }
}

// What every command touches first (loader, C library, shell, Python) is read once here, so that every restored machine has it in memory.
static void warm(void) {
    static const char *const commands[] = {"exec /bin/sh -c 'ls / >/dev/null'", "exec python3 -I -c 'import json, os, re, subprocess, sys'", NULL};
    for (int i = 0; commands[i]; i++) {
        pid_t child = fork();
        if (!child) {
            int null = open("/dev/null", O_RDWR);
            dup2(null, 0), dup2(null, 1), dup2(null, 2);
            if (chroot("/base") || chdir("/")) _exit(1);
            execle("/bin/sh", "sh", "-c", commands[i], NULL, (char *[]){"PATH=/usr/bin:/bin", NULL});
            _exit(1);
        }
        waitpid(child, NULL, 0);
    }
}

int main(void) {
    mkdir("/dev", 0755), mkdir("/proc", 0755), mkdir("/sys", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    int console = open("/dev/console", O_RDWR | O_CLOEXEC);
    if (console >= 0) dup2(console, 0), dup2(console, 1), dup2(console, 2);
    load_modules();
    for (int tries = 0; access("/dev/vda", F_OK) && tries < 1000; tries++) usleep(2000);
    must(mount_at("/dev/vda", "/base", "erofs", MS_RDONLY, NULL), failure);
    must(mount_at("tmpfs", "/own", "tmpfs", 0, "size=64k,mode=755"), failure);
    must(write_file("/own/resolv.conf", "nameserver 198.18.0.1\n") && write_file("/own/hostname", "box\n"), "/own");
    must(write_file("/own/hosts", "127.0.0.1 localhost box\n::1 localhost\n") && !sethostname("box", 3), "/own");
    must(mount_at("cgroup2", "/cgroup", "cgroup2", 0, NULL), failure);
    must(write_file("/cgroup/cgroup.subtree_control", "+pids +memory") && !mkdir("/cgroup/box", 0755), "/cgroup");
    network();
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){1024, 65536});
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    warm();
    int agent = open_port("agent");
    port = open_port("control");
    must(agent >= 0 && port >= 0, "ports");
    int go[2];
    must(!pipe2(go, O_CLOEXEC), "pipe");
    pid_t child = fork();
    must(child >= 0, "fork");
    if (!child) {
        close(agent);
        if (write(port, "ready\n", 6) < 0) {} // the machine is as every box begins: now is the time to capture it
        control(go[1]);
    }
    close(port);
    char begin;
    while (read(go[0], &begin, 1) != 1) {}
    close(go[0]), close(go[1]);
    must(write_file("/cgroup/box/cgroup.procs", "1"), "cgroup"); // the agent counts too, as on every other tier
    must(!chdir("/box") && !mount(".", "/", NULL, MS_MOVE, NULL) && !chroot(".") && !chdir("/"), "root");
    for (int i = 0; i < 3; i++) { // the console belongs to the machine, not to the box
        int null = open("/dev/null", O_RDWR);
        if (null >= 0) dup2(null, i);
        if (null > 2) close(null);
    }
    clearenv();
    fcntl(agent, F_SETFL, O_RDWR | O_NONBLOCK);
    return agent_main(agent, agent, -1, true);
}
