/* Makes chosen writes and syncs of a shard's data.mdb fail: LD_PRELOAD, see failing_disk.py.
 *
 * $FAILING_DISK names a file "FIRST COUNT ERRNO LANDS". From the moment that it says so, the calls FIRST to
 * FIRST+COUNT-1 (from 1 on) that would write or sync a data.mdb fail with ERRNO; the first of them is done nevertheless
 * where LANDS is 1. FIRST is 0 for the first write of a meta page. Each call is noted in FILE.calls, as "name offset
 * bytes failed". LMDB has two descriptors of the file, maps it for reading alone (no msync), and writes its meta pages
 * through the one that it opened with O_DSYNC.
 *
 * With $NO_WRITABLE_MAPS no file can be mapped shared and to be written, as on some network file systems.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define META_BYTES 8192

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char known[64];
static int calls, start;

static int is_data(int fd) {
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 9) return 0;
    path[length] = 0;
    return strcmp(path + length - 9, "/data.mdb") == 0;
}

/* The error that this call fails with, or 0; *lands says whether it is done before. */
static int fault(const char *name, int fd, long offset, long bytes, int *lands) {
    const char *control = getenv("FAILING_DISK");
    char text[64] = "", notes[4096];
    int saved = errno, first = 0, count = 0, number = 0, landing = 0, failed = 0;
    *lands = 0;
    if (control == NULL || !is_data(fd)) return errno = saved, 0;
    pthread_mutex_lock(&lock);
    FILE *file = fopen(control, "r");
    if (file != NULL) {
        if (fgets(text, sizeof text, file) == NULL) text[0] = 0;
        fclose(file);
        if (strcmp(text, known) != 0) {
            strcpy(known, text);
            calls = start = 0;
        }
        calls++;
        int told = sscanf(text, "%d %d %d %d", &first, &count, &number, &landing) == 4;
        if (told && start == 0 && (first != 0 || (offset >= 0 && offset < META_BYTES))) start = first ? first : calls;
        if (told && start != 0 && calls >= start && calls < start + count) {
            failed = number;
            *lands = landing && calls == start;
        }
        snprintf(notes, sizeof notes, "%s.calls", control);
        if ((file = fopen(notes, "a")) != NULL) {
            fprintf(file, "%s %ld %ld %d\n", name, offset, bytes, failed);
            fclose(file);
        }
    }
    pthread_mutex_unlock(&lock);
    errno = saved;
    return failed;
}

/* The real one is called through its own type. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_OR(offset, bytes, name, ...)                                                                              \
    int lands, failed = fault(#name, fd, offset, bytes, &lands);                                                      \
    if (!failed) return REAL(name)(__VA_ARGS__);                                                                       \
    if (lands) REAL(name)(__VA_ARGS__);                                                                                \
    errno = failed;                                                                                                    \
    return -1

static long total(const struct iovec *pieces, int count) {
    long bytes = 0;
    for (int piece = 0; piece < count; piece++) bytes += (long)pieces[piece].iov_len;
    return bytes;
}

ssize_t write(int fd, const void *from, size_t bytes) { FAIL_OR(-1, (long)bytes, write, fd, from, bytes); }
ssize_t writev(int fd, const struct iovec *pieces, int count) {
    FAIL_OR((long)lseek(fd, 0, SEEK_CUR), total(pieces, count), writev, fd, pieces, count);
}
ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at) {
    FAIL_OR((long)at, (long)bytes, pwrite, fd, from, bytes, at);
}
ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t at) {
    FAIL_OR((long)at, (long)bytes, pwrite64, fd, from, bytes, at);
}
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at) {
    FAIL_OR((long)at, total(pieces, count), pwritev, fd, pieces, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t at) {
    FAIL_OR((long)at, total(pieces, count), pwritev64, fd, pieces, count, at);
}
int fsync(int fd) { FAIL_OR(-1, 0, fsync, fd); }
int fdatasync(int fd) { FAIL_OR(-1, 0, fdatasync, fd); }

#define MAP_OR_REFUSE(name)                                                                                            \
    if (getenv("NO_WRITABLE_MAPS") != NULL && fd >= 0 && flags & MAP_SHARED && access & PROT_WRITE)                    \
        return errno = EINVAL, MAP_FAILED;                                                                             \
    return REAL(name)(at, bytes, access, flags, fd, offset)

void *mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset) { MAP_OR_REFUSE(mmap); }
void *mmap64(void *at, size_t bytes, int access, int flags, int fd, off64_t offset) { MAP_OR_REFUSE(mmap64); }
