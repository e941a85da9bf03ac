// The network of one virtual machine: Ethernet frames of QEMU on one side, plain sockets in the box's network namespace on the other.
// Its own process, so that what parses a guest's packets holds neither the machine's memory nor any privilege. Ends with QEMU.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <slirp/libslirp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FRAME_MAX 65550

struct timer {
    struct timer *next;
    SlirpTimerCb run;
    void *with;
    int64_t at; // ms, -1: not set
};

static int wire; // to QEMU: u32 length (big endian), frame
static struct timer *timers;
static struct pollfd polled[4096];
static int polls;

static int64_t now(void *with) {
    (void)with;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static ssize_t to_guest(const void *frame, size_t length, void *with) {
    (void)with;
    uint32_t head = htonl(length);
    struct iovec parts[] = {{&head, 4}, {(void *)frame, length}}, *part = parts;
    for (int left = 2; left;) {
        ssize_t sent = writev(wire, part, left);
        if (sent < 0 && errno == EAGAIN) poll(&(struct pollfd){.fd = wire, .events = POLLOUT}, 1, -1);
        else if (sent < 0 && errno != EINTR) exit(0);
        if (sent < 0) continue;
        while (left && (size_t)sent >= part->iov_len) sent -= part->iov_len, part++, left--;
        if (left) part->iov_base = (char *)part->iov_base + sent, part->iov_len -= sent;
    }
    return length;
}

static void guest_error(const char *message, void *with) { (void)message, (void)with; }

static void *timer_new(SlirpTimerCb run, void *argument, void *with) {
    (void)with;
    struct timer *timer = calloc(1, sizeof *timer);
    if (!timer) abort();
    *timer = (struct timer){timers, run, argument, -1};
    return timers = timer;
}

static void timer_free(void *which, void *with) {
    (void)with;
    struct timer **at = &timers;
    while (*at && *at != which) at = &(*at)->next;
    if (*at) *at = (*at)->next;
    free(which);
}

static void timer_mod(void *which, int64_t at, void *with) {
    (void)with;
    ((struct timer *)which)->at = at;
}

static void poll_fd(int fd, void *with) { (void)fd, (void)with; }
static void notify(void *with) { (void)with; }

static const int pairs[][2] = {{SLIRP_POLL_IN, POLLIN}, {SLIRP_POLL_OUT, POLLOUT}, {SLIRP_POLL_PRI, POLLPRI}, {SLIRP_POLL_ERR, POLLERR}, {SLIRP_POLL_HUP, POLLHUP}};

static int add_poll(int fd, int events, void *with) {
    (void)with;
    if (polls == sizeof polled / sizeof *polled) return -1;
    polled[polls] = (struct pollfd){.fd = fd};
    for (int i = 0; i < 5; i++)
        if (events & pairs[i][0] && i < 3) polled[polls].events |= pairs[i][1];
    return polls++;
}

static int get_events(int index, void *with) {
    (void)with;
    int events = 0;
    for (int i = 0; index >= 0 && i < 5; i++)
        if (polled[index].revents & pairs[i][1]) events |= pairs[i][0];
    return events;
}

static void from_guest(Slirp *slirp) {
    static uint8_t inbox[4 * FRAME_MAX];
    static size_t received;
    ssize_t got = read(wire, inbox + received, sizeof inbox - received);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) exit(0); // the machine is gone
    received += got;
    size_t at = 0;
    while (received - at >= 4) {
        uint32_t length;
        memcpy(&length, inbox + at, 4);
        length = ntohl(length);
        if (length > FRAME_MAX) exit(1);
        if (received - at < 4 + length) break;
        slirp_input(slirp, inbox + at + 4, length);
        at += 4 + length;
    }
    memmove(inbox, inbox + at, received - at);
    received -= at;
}

int main(int argc, char **argv) {
    if (argc != 2) return 64;
    wire = atoi(argv[1]);
    fcntl(wire, F_SETFL, O_NONBLOCK);
    signal(SIGPIPE, SIG_IGN);
    SlirpConfig config = {.version = 1, .in_enabled = true, .if_mtu = 1500, .if_mru = 1500};
    inet_pton(AF_INET, "10.0.2.0", &config.vnetwork);
    inet_pton(AF_INET, "255.255.255.0", &config.vnetmask);
    inet_pton(AF_INET, "10.0.2.2", &config.vhost);
    inet_pton(AF_INET, "10.0.2.15", &config.vdhcp_start);
    inet_pton(AF_INET, "10.0.2.3", &config.vnameserver);
    SlirpCb calls = {.send_packet = to_guest, .guest_error = guest_error, .clock_get_ns = now, .timer_new = timer_new, .timer_free = timer_free, .timer_mod = timer_mod, .register_poll_fd = poll_fd, .unregister_poll_fd = poll_fd, .notify = notify};
    Slirp *slirp = slirp_new(&config, &calls, NULL);
    if (!slirp) return 70;
    for (;;) {
        uint32_t timeout = 3600000;
        polls = 0;
        add_poll(wire, SLIRP_POLL_IN, NULL);
        slirp_pollfds_fill(slirp, &timeout, add_poll, NULL);
        int64_t time = now(NULL) / 1000000;
        for (struct timer *timer = timers; timer; timer = timer->next)
            if (timer->at >= 0 && timer->at - time < timeout) timeout = timer->at > time ? timer->at - time : 0;
        int ready = poll(polled, polls, timeout);
        slirp_pollfds_poll(slirp, ready < 0, get_events, NULL);
        if (ready > 0 && polled[0].revents) from_guest(slirp);
        time = now(NULL) / 1000000;
        for (struct timer *timer = timers; timer; timer = timer->next)
            if (timer->at >= 0 && timer->at <= time) {
                timer->at = -1;
                timer->run(timer->with);
                break; // the list may have changed
            }
    }
}
