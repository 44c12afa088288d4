/* Let the k-th write, flush or renaming under runs/ fail, once, as a bad sector does.
   For LD_PRELOAD: these definitions hide the C library's. test_kill.py compiles it, disk.py uses it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int *calls, failing; /* forked processes count together */

void fail_at(int k)
{
    if (!calls)
        calls = mmap(0, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *calls = 0, failing = k;
}

int calls_so_far(void) { return *calls; }

static int fails(const char *path)
{
    if (!calls || !strstr(path, "runs/") || ++*calls != failing)
        return 0;
    errno = EIO;
    return 1;
}

static int fails_of(int descriptor)
{
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    return readlink(link, path, sizeof path - 1) > 0 && fails(path);
}

ssize_t write(int fd, const void *data, size_t size)
{
    return fails_of(fd) ? -1 : syscall(SYS_write, fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    return fails_of(fd) ? -1 : syscall(SYS_writev, fd, parts, count);
}

int fsync(int fd) { return fails_of(fd) ? -1 : (int)syscall(SYS_fsync, fd); }

int rename(const char *from, const char *to)
{
    return fails(to) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
