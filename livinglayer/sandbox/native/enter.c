// See enter.h. Every step that fails ends the box before any of its code runs.
#define _GNU_SOURCE
#include "enter.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif
// <sys/mount.h> and <linux/mount.h> can't both be included with this libc.
extern int mount(const char *, const char *, const char *, unsigned long, const void *);
extern int umount2(const char *, int);
enum { PRIVATE_RECURSIVE = (1 << 18) | (1 << 14), DETACH = 2 };

static int open_fs(const char *type) { return syscall(SYS_fsopen, type, 1 /* FSOPEN_CLOEXEC */); }
static int set_string(int fs, const char *key, const char *value) { return syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0); }
static int set_flag(int fs, const char *key) { return syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, key, NULL, 0); }
static int set_fd(int fs, const char *key, int fd) { return syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, key, NULL, fd); }
static int create(int fs) { return syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0); }
static int make_mount(int fs, unsigned attributes) { return syscall(SYS_fsmount, fs, 1 /* FSMOUNT_CLOEXEC */, attributes); }
static int move(int mount_fd, int directory, const char *path) {
    return syscall(SYS_move_mount, mount_fd, "", directory, path, MOVE_MOUNT_F_EMPTY_PATH);
}
static int clone_tree(int directory, const char *path, unsigned flags) {
    return syscall(SYS_open_tree, directory, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | flags);
}
static int set_attributes(int mount_fd, uint64_t attributes, int user) {
    struct mount_attr attr = {.attr_set = attributes, .userns_fd = user < 0 ? 0 : user};
    return syscall(SYS_mount_setattr, mount_fd, "", AT_EMPTY_PATH, &attr, sizeof attr);
}

#define STEP(name) (*step = (name))
#define TRY(name, call) do { STEP(name); if ((call) < 0) return -1; } while (0)

static int write_fd(int fd, const char *text, size_t length) { return write(fd, text, length) == (ssize_t)length ? 0 : -1; }

static int raise_powers(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data)) return -1;
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    return syscall(SYS_capset, &header, data);
}

// Overlay keeps the credentials of its mounter for work on the upper directory: they must be ids that its idmapped mount knows.
static int act_as(uint32_t id) {
    syscall(SYS_setfsgid, id);
    syscall(SYS_setfsuid, id);
    return raise_powers(); // leaving fsuid 0 drops the file capabilities
}

int open_layer(const struct box *box, const char *name) {
    if (!strcmp(name, "host")) return clone_tree(AT_FDCWD, "/host", 0); // never idmapped: its owners stay strangers to the box
    char path[512];
    snprintf(path, sizeof path, "/state/layers/%s", name);
    int fd = clone_tree(AT_FDCWD, path, 0);
    if (fd >= 0 && set_attributes(fd, MOUNT_ATTR_IDMAP | MOUNT_ATTR_RDONLY, box->user)) return close(fd), -1;
    return fd;
}

int map_mount(int mount_fd, int user) { return set_attributes(mount_fd, MOUNT_ATTR_IDMAP | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, user); }

#ifndef WITHOUT_NOSUID
#define ROOT_ATTRIBUTES (MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID)
#else
#define ROOT_ATTRIBUTES 0
#endif

int box_root(const struct box *box, const char **step) {
    char path[512], options[LAYERS_MAX * 8 + 64];
    int fs, upper, layer, layers[LAYERS_MAX], opened = 0; // a detached mount lives as long as its fd: until the overlay has its own clone
    snprintf(path, sizeof path, "/state/boxes/%s", box->upper);
    TRY("upper", upper = clone_tree(AT_FDCWD, path, 0));
    TRY("idmap upper", set_attributes(upper, MOUNT_ATTR_IDMAP, box->user));
    TRY("overlay", fs = open_fs("overlay"));
    bool by_path = box->by_path;
    if (!by_path) { // layers by fd, kernel 6.13 and newer
        for (int i = 0; i < box->layer_count && !by_path; i++) {
            TRY(box->layers[i], layer = box->layer_fds[i] >= 0 ? box->layer_fds[i] : open_layer(box, box->layers[i]));
            if (set_fd(fs, "lowerdir+", layer)) {
                if (i || errno != EINVAL) return STEP("lowerdir"), -1;
                by_path = true;
            }
            if (box->layer_fds[i] < 0) layers[opened++] = layer;
        }
    }
    if (!by_path) {
        int top, work;
        TRY("upper/u", top = openat(upper, "u", O_PATH | O_DIRECTORY | O_CLOEXEC));
        TRY("upper/w", work = openat(upper, "w", O_PATH | O_DIRECTORY | O_CLOEXEC));
        TRY("upperdir", set_fd(fs, "upperdir", top));
        TRY("workdir", set_fd(fs, "workdir", work));
        close(top);
        close(work);
    } else { // older kernels take paths only: the mounts are attached at /m/N of this mount namespace
        int length = 0;
        for (int i = 0; i < box->layer_count; i++) {
            TRY(box->layers[i], layer = open_layer(box, box->layers[i]));
            snprintf(path, sizeof path, "/m/%d", i);
            TRY("attach layer", move(layer, AT_FDCWD, path));
            close(layer);
            length += snprintf(options + length, sizeof options - length, "%s/m/%d", i ? ":" : "", i);
        }
        TRY("attach upper", move(upper, AT_FDCWD, "/m/upper"));
        TRY("lowerdir", set_string(fs, "lowerdir", options));
        TRY("upperdir", set_string(fs, "upperdir", "/m/upper/u"));
        TRY("workdir", set_string(fs, "workdir", "/m/upper/w"));
    }
    set_flag(fs, "volatile"); // a box's disk need not outlive a power cut; snapshots are what is kept
    // A snapshot's files may carry overlay marks of a stranger: none that redirects a name is believed.
    TRY("redirect_dir", set_string(fs, "redirect_dir", "nofollow"));
    TRY("metacopy", set_string(fs, "metacopy", "off"));
    TRY("index", set_string(fs, "index", "off"));
    TRY("act as the box", act_as(box->base));
    int made = create(fs), error = errno;
    TRY("act as root", act_as(0));
    errno = error;
    STEP("overlay create");
    if (made) return -1;
    int root;
    TRY("overlay mount", root = make_mount(fs, ROOT_ATTRIBUTES));
    close(fs);
    close(upper);
    while (opened) close(layers[--opened]);
    return root;
}

// Attaches a mount at a directory of the box's root, which is the working directory. Layers may hold links planted by whoever
// made them: the path is looked up as if chrooted, and our own mount points may not be links at all.
static int attach(int mount_fd, const char *path, bool ours) {
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | (ours ? RESOLVE_NO_SYMLINKS : 0)};
    int target = syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (target < 0) return -1;
    int failed = syscall(SYS_move_mount, mount_fd, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH), error = errno;
    close(target);
    return errno = error, failed;
}

// Makes the directories of a path in the box's root that are not there yet, owned by the box's root; links in it lead nowhere but inside.
static int make_directories(const struct box *box, const char *path) {
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    char part[4096];
    size_t length = strlen(path);
    if (length >= sizeof part) return errno = ENAMETOOLONG, -1;
    int failed = act_as(box->base), error;
    int above = failed ? -1 : open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; above >= 0 && i < length;) {
        size_t start = i + strspn(path + i, "/"), end = start + strcspn(path + start, "/");
        memcpy(part, path, end);
        part[end] = 0;
        int next = syscall(SYS_openat2, AT_FDCWD, part, &how, sizeof how);
        if (next < 0 && errno == ENOENT && !mkdirat(above, part + start, 0755)) next = syscall(SYS_openat2, AT_FDCWD, part, &how, sizeof how);
        error = errno;
        close(above);
        errno = error;
        above = next;
        i = end;
    }
    failed = above < 0, error = errno;
    if (above >= 0) close(above);
    if (act_as(0)) return -1;
    return failed ? (errno = error, -1) : 0;
}

static int mount_at(const char *type, const char *const *options, unsigned attributes, const char *path) {
    int fs = open_fs(type);
    if (fs < 0) return -1;
    for (; options && options[0]; options += 2) set_string(fs, options[0], options[1]);
    int fd = create(fs) ? -1 : make_mount(fs, attributes);
    int failed = fd < 0 || attach(fd, path, true);
    int error = errno;
    if (fd >= 0) close(fd);
    close(fs);
    return failed ? (errno = error, -1) : 0;
}

// What procfs tells of the host rather than of the box: its kernel's arguments, its disks, its interrupts, its locks, keys of other boxes that had
// the same ids. (The rest that tells something asks for rights over the host, which no box has.)
static const char *const masked[] = {"proc/cmdline", "proc/keys", "proc/partitions", "proc/diskstats", "proc/interrupts", "proc/locks"};

static int mask_proc(void) {
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
        int empty = clone_tree(AT_FDCWD, "/empty", 0);
        if (empty < 0) return -1;
        int failed = move(empty, AT_FDCWD, masked[i]) && errno != ENOENT, error = errno; // a kernel may be built without one
        close(empty);
        if (failed) return errno = error, -1;
    }
    return 0;
}

// What root inside the box keeps, within its own user namespace: enough for apt, su and servers on low ports.
static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SETUID, CAP_SETGID, CAP_KILL, CAP_NET_BIND_SERVICE};

static int give_up_powers(void) {
#ifndef WITHOUT_CAPS
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    uint64_t mask = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) mask |= 1ULL << kept[i];
    for (int i = 0; i <= CAP_LAST_CAP; i++)
        if (!(mask >> i & 1) && prctl(PR_CAPBSET_DROP, i) && errno != EINVAL) return -1;
    data[0].effective = data[0].permitted = mask;
    data[1].effective = data[1].permitted = mask >> 32;
    if (syscall(SYS_capset, &header, data)) return -1;
#endif
#ifndef WITHOUT_NO_NEW_PRIVS
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
#else
    return 0;
#endif
}

// The session keyring of whoever started the host came with us, with the right to read it (trap 2): a new one takes its place.
static int leave_keyring(void) {
#ifndef WITHOUT_KEYRING
    if (syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL) < 0 && errno != ENOSYS && errno != EDQUOT) return -1;
#endif
    return 0;
}

static void set_limits(void) {
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) { // a box may only lower what the host has: asking for more would set nothing at all
        if (files.rlim_max > 65536) files.rlim_max = 65536;
        files.rlim_cur = files.rlim_max < 4096 ? files.rlim_max : 4096;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){65536, 65536});
    setrlimit(RLIMIT_MSGQUEUE, &(struct rlimit){819200, 819200});
    setrlimit(RLIMIT_SIGPENDING, &(struct rlimit){4096, 4096});
}

int box_enter(const struct box *box, const char **step) {
    // Attach first: a cgroup namespace made before would show the host's path (trap 8).
    for (int i = 0; i < box->task_count; i++) TRY("cgroup", write_fd(box->tasks[i], "0", 1));
#ifndef WITHOUT_CGROUPNS
    TRY("cgroup namespace", unshare(CLONE_NEWCGROUP));
#endif
#ifndef WITHOUT_NETNS
    if (box->network >= 0) TRY("network namespace", setns(box->network, CLONE_NEWNET));
#endif

    int root;
    if ((root = box_root(box, step)) < 0) return -1;
    TRY("move root", move(root, AT_FDCWD, "/root"));
    TRY("chdir", fchdir(root));
    const unsigned hard = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    TRY("proc", mount_at("proc", NULL, hard, "proc"));
#ifndef WITHOUT_PROC_MASK
    TRY("proc mask", mask_proc());
#endif
    int dev;
    TRY("dev", dev = clone_tree(AT_FDCWD, "/dev", 0));
    TRY("dev mount", attach(dev, "dev", true));
    close(dev);
    TRY("pts", mount_at("devpts", (const char *[]){"mode", "620", "ptmxmode", "666", "max", "64", NULL}, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, "dev/pts"));
    char bytes[32];
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)box->shm_bytes);
    TRY("shm", mount_at("tmpfs", (const char *[]){"size", bytes, "mode", "1777", "nr_inodes", "65536", NULL}, hard & ~MOUNT_ATTR_NOEXEC, "dev/shm"));
    for (int i = 0; i < box->mount_count; i++) TRY(box->mounts[i].path, make_directories(box, box->mounts[i].path));
    for (int i = 0; i < box->mount_count; i++) TRY(box->mounts[i].path, attach(box->mounts[i].fd, box->mounts[i].path, false));
    TRY("chroot", chroot("."));
    TRY("chdir /", chdir("/"));
    close(root);
#ifndef WITHOUT_UTSNS
    TRY("hostname", sethostname(box->name, strlen(box->name)));
#endif

#ifndef WITHOUT_USERNS
    TRY("user namespace", setns(box->user, CLONE_NEWUSER));
#endif
    TRY("keyring", leave_keyring());
    TRY("groups", syscall(SYS_setgroups, 0, NULL));
    TRY("gid", syscall(SYS_setresgid, 0, 0, 0));
    TRY("uid", syscall(SYS_setresuid, 0, 0, 0));
    set_limits();
#ifndef WITHOUT_DEATH_SIGNAL
    TRY("die with the spawner", prctl(PR_SET_PDEATHSIG, SIGKILL)); // after the last change of identity, which clears it
#endif
#ifndef WITHOUT_UNDUMPABLE
    TRY("no dump", prctl(PR_SET_DUMPABLE, 0));
#endif
    TRY("capabilities", give_up_powers());
#ifndef WITHOUT_SECCOMP
    if (box->filter) TRY("seccomp", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, box->filter));
#endif
    return 0;
}

int box_join(int pidfd, int root, const int *tasks, int task_count, uint32_t uid, uint32_t gid, bool alone, const struct sock_fprog *filter, const char **step) {
    for (int i = 0; i < task_count; i++) TRY("cgroup", write_fd(tasks[i], "0", 1));
    TRY("namespaces", setns(pidfd, CLONE_NEWNS | CLONE_NEWNET | (alone ? 0 : CLONE_NEWIPC) | CLONE_NEWUTS | CLONE_NEWCGROUP));
    if (alone) TRY("ipc namespace", unshare(CLONE_NEWIPC));
    TRY("root", fchdir(root));
    TRY("chroot", chroot("."));
    TRY("user namespace", setns(pidfd, CLONE_NEWUSER));
    TRY("keyring", leave_keyring());
    TRY("groups", syscall(SYS_setgroups, 0, NULL));
    TRY("gid", syscall(SYS_setresgid, gid, gid, gid));
    set_limits();
    setsid();
    TRY("capabilities", give_up_powers());
    TRY("uid", syscall(SYS_setresuid, uid, uid, uid));
    // Leaving root's id takes the capabilities, but only from root of this user namespace, which a process that has just joined it never was.
    if (uid) TRY("no capabilities", syscall(SYS_capset, &(struct __user_cap_header_struct){_LINUX_CAPABILITY_VERSION_3, 0}, (struct __user_cap_data_struct[2]){0}));
    if (filter) TRY("seccomp", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, filter));
    return 0;
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int failed = fd < 0 || write_fd(fd, text, strlen(text));
    if (fd >= 0) close(fd);
    return failed ? -1 : 0;
}

int make_user_namespace(uint32_t base) {
    int ready[2];
    if (pipe2(ready, O_CLOEXEC)) return -1;
    pid_t holder = fork();
    if (holder == 0) {
        // The kernel counts what the namespace uses (inotify, namespaces) against its maker: root as the maker would let one box use up root's share.
        prctl(PR_SET_KEEPCAPS, 1);
        if (syscall(SYS_setresgid, base, base, base) || syscall(SYS_setresuid, base, base, base) || raise_powers()) _exit(1);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWUSER) || write(ready[1], "", 1) != 1) _exit(1);
        for (;;) pause();
    }
    close(ready[1]);
    char byte, path[64], map[64];
    int fd = -1;
    if (holder > 0 && read(ready[0], &byte, 1) == 1) {
        snprintf(map, sizeof map, "0 %u 65536", base);
        snprintf(path, sizeof path, "/proc/%d/uid_map", holder);
        int failed = write_file(path, map);
        snprintf(path, sizeof path, "/proc/%d/gid_map", holder);
        failed = failed || write_file(path, map);
        snprintf(path, sizeof path, "/proc/%d/ns/user", holder);
        fd = failed ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    }
    close(ready[0]);
    if (holder > 0) kill(holder, SIGKILL), waitpid(holder, NULL, 0);
    return fd;
}

static int make_dev(void) {
    static const struct { const char *name; int major, minor; } nodes[] = {
        {"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
    static const char *const links[][2] = {
        {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}};
    const char *options[] = {"mode", "0755", "size", "64k", NULL};
    if (mkdir("/dev", 0755) || mount_at("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, "/dev")) return -1;
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/%s", nodes[i].name);
        if (mknod(path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) || chmod(path, 0666)) return -1;
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/%s", links[i][1]);
        if (symlink(links[i][0], path)) return -1;
    }
    if (mkdir("/dev/pts", 0755) || mkdir("/dev/shm", 0755)) return -1;
    int fd = open("/dev", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int failed = fd < 0 || set_attributes(fd, MOUNT_ATTR_RDONLY, -1); // boxes share this tree: none may add to it
    if (fd >= 0) close(fd);
    return failed;
}

int enter_empty_root(const char *state) {
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, PRIVATE_RECURSIVE, NULL)) return -1;
    int disk = clone_tree(AT_FDCWD, state, 0), host = clone_tree(AT_FDCWD, "/", 0), proc = clone_tree(AT_FDCWD, "/proc", 0);
    int fs = open_fs("tmpfs");
    if (disk < 0 || host < 0 || proc < 0 || fs < 0) return -1;
    set_string(fs, "mode", "0755");
    set_string(fs, "size", "1m");
    int root = create(fs) ? -1 : make_mount(fs, MOUNT_ATTR_NOSUID);
    close(fs);
    if (root < 0 || move(root, AT_FDCWD, "/mnt") || fchdir(root)) return -1;
    for (const char **name = (const char *[]){"state", "host", "root", "proc", "m", "m/upper", NULL}; *name; name++)
        if (mkdir(*name, 0755)) return -1;
    for (int i = 0; i < LAYERS_MAX; i++) {
        char path[16];
        snprintf(path, sizeof path, "m/%d", i);
        if (mkdir(path, 0755)) return -1;
    }
    int empty = open("empty", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (empty < 0 || close(empty)) return -1;
    if (set_attributes(host, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, -1)) return -1;
    if (move(disk, AT_FDCWD, "state") || move(host, AT_FDCWD, "host") || move(proc, AT_FDCWD, "proc")) return -1;
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", DETACH) || chdir("/")) return -1;
    if (mount(NULL, "/", NULL, PRIVATE_RECURSIVE, NULL)) return -1;
    return make_dev();
}
