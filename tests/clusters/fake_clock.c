/* A wall clock that is moved by the number in the file $FAKE_CLOCK, for LD_PRELOAD.
 *
 * Waits until a time of the wall clock see it move, as they do when a clock is set.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double *
offset(void)
{
    static double *mapped, none;
    if (mapped == NULL) {
        const char *path = getenv("FAKE_CLOCK");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *page = file < 0 ? MAP_FAILED
                              : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0)
            close(file);
        mapped = page == MAP_FAILED ? &none : page;
    }
    return mapped;
}

int
clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += (time_t)*offset();
    return failed;
}

int
gettimeofday(struct timeval *now, void *zone)
{
    (void)zone;
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t
time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL)
        *out = now.tv_sec;
    return now.tv_sec;
}

int
sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    for (;;) {
        if (sem_trywait(semaphore) == 0)
            return 0;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec > until->tv_sec ||
            (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) {
            errno = ETIMEDOUT;
            return -1;
        }
        struct timespec nap = {0, 1000000};
        if (nanosleep(&nap, NULL) != 0)
            return -1; /* a signal */
    }
}
