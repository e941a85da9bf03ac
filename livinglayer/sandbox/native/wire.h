// The frames between the host and a guest agent: struct frame, then `length` bytes of payload. Little endian, as the machine.
// agent.py holds the same numbers; a test compares the two files.
#pragma once
#include <stdint.h>

#define FRAME_MAX 65536
#define REQUEST_MAX (4 << 20) // of a request in pieces: twice what Linux takes as arguments and environment of a command

struct frame {
    uint32_t length, id, kind;
};

enum {
    // host → agent. Strings end in NUL; `user` is a name of the box's /etc/passwd or a number, empty for root. Of files it may be
    // A>B: with the rights of A, and what is made belongs to B.
    EXEC = 1,      // u32 flags, u32 rows, u32 columns, str user, str cwd, u32 argc, argc str, u32 envc, envc str
    INPUT = 2,     // bytes for stdin, a file being written, or a connection
    INPUT_END = 3, // no more of them
    SIGNAL = 4,    // i32 signal, u32 tree (1: all descendants too)
    RESIZE = 5,    // u32 rows, u32 columns
    WINDOW = 6,    // u32 bytes the host can take more of this id
    CANCEL = 7,    // forget this id: closes a connection, a watch, a read
    MORE = 8,      // bytes that the next request of this id begins with: one that is larger than a frame comes in pieces
    READ = 10,     // str user, str path, or of a part of it also u64 offset, u64 bytes
    WRITE = 11,    // u32 mode, u32 flags, str user, str path, or also str prefix and (str name, str value)…: attributes, all below `prefix`; then INPUT…, INPUT_END
    LIST = 12,     // u32 depth, str user, str path
    STAT = 13,     // str user, str path
    MOVE = 14,     // str user, str from, str to
    REMOVE = 15,   // str user, str path
    MKDIR = 16,    // u32 mode, str user, str path
    LINK = 17,     // str user, str target, str path: a symbolic link
    CHMOD = 18,    // u32 mode, str user, str path
    WATCH = 19,    // u32 recursive, str user, str path
    CONNECT = 20,  // u32 port: a TCP connection to 127.0.0.1 (or ::1) in the box
    PING = 21,     // bytes to give back
    CLOCK = 22,    // i64 nanoseconds since 1970, str hostname, bytes of entropy: after a resume, in a VM
    PROCESSES = 23,
    WHO = 24,      // str user

    // agent → host
    READY = 64,    // u32 version
    STARTED = 65,  // u32 pid
    STDOUT = 66,   // bytes; also of a file that is read, of a connection
    STDERR = 67,
    EXIT = 68,     // i32 wait status, u64 user µs, u64 system µs, u64 max resident bytes
    DONE = 69,     // u32 errno (0: well), str what went wrong
    ENTRY = 70,    // u32 mode, uid, gid, u64 size, i64 mtime ns, str path, str target, u32 mode of what a link leads to, str its path, str owner, str group, (str name, str value)… of attributes
    EVENT = 71,    // u32 inotify mask, str path
    PONG = 72,
    CREDIT = 73,   // u32 bytes of INPUT consumed
    PROCESS = 74,  // u32 id, u32 pid
    PERSON = 75,   // u32 uid, u32 gid, str name, str home
};

enum { EXEC_PTY = 1, EXEC_STDIN = 2, EXEC_CORK = 4 }; // CORK: STARTED and what follows may wait a little for the end
enum { WRITE_APPEND = 1, WRITE_PARENTS = 2 };

#define WINDOW_START (1 << 20) // what either side may send of one id before it hears WINDOW or CREDIT
