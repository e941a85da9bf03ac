// Makes the calling process the first one of a box: cgroup, namespaces, root, identity, filter, in the only order that is safe.
// The WITHOUT_… macros leave one protection out each. No build sets them: the tests do, to see that the escape suite notices.
#pragma once
#include <linux/filter.h>
#include <stdbool.h>
#include <stdint.h>

#define LAYERS_MAX 64
#define MOUNTS_MAX 32
#define TASKS_MAX 8

struct mount_in {
    int fd;           // a detached mount made by the host
    const char *path; // where it goes in the box
};

struct box {
    const char *name;               // the box's host name
    int tasks[TASKS_MAX], task_count; // cgroup files: writing "0" attaches the writer
    int network;                    // network namespace, -1: keep
    int user;                       // user namespace with the box's own range of ids
    uint32_t base;                  // first id of that range
    const char *layers[LAYERS_MAX]; // under /state, topmost first; "host" is the host's own /
    int layer_count;
    int layer_fds[LAYERS_MAX];      // their mounts, when open_layer has made them already; -1: not yet
    const char *upper;              // under /state: a directory with u and w
    struct mount_in mounts[MOUNTS_MAX];
    int mount_count;
    uint64_t shm_bytes;
    const struct sock_fprog *filter;
    bool by_path;                   // force the way of kernels before 6.13
};

// 0, or -1 with errno and *step naming what failed.
int box_enter(const struct box *box, const char **step);

// The overlay of a box as a detached mount, idmapped into its range, for runtimes that bring namespaces of their own. -1 on failure.
int box_root(const struct box *box, const char **step);

// One layer as a detached mount, idmapped into the box's range unless it is the host's own /. It may serve any box of that range.
int open_layer(const struct box *box, const char *name);

// A detached mount of the host's, mapped into a range of ids. It gives no rights and holds no devices.
int map_mount(int mount_fd, int user);

// The calling process joins a box that runs already: a fork of the Python zygote. Its pid namespace was joined before the fork.
// `alone`: with an IPC namespace of its own, so that nothing of it is left there.
int box_join(int pidfd, int root, const int *tasks, int task_count, uint32_t uid, uint32_t gid, bool alone, const struct sock_fprog *filter, const char **step);

// A user namespace whose id 0 is host id `base`, 65536 ids wide.
int make_user_namespace(uint32_t base);

// Leaves the host's tree for an empty one that holds /state (the state's disk), /host (the host's own /, without its submounts), /dev, /m.
int enter_empty_root(const char *state);
