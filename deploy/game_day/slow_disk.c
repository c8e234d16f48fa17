/* Makes a shard's commits slow: LD_PRELOAD. While the file $SLOW_DISK exists, each fdatasync takes two seconds more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int fd) {
    const char *slow = getenv("SLOW_DISK");
    if (slow != NULL && access(slow, F_OK) == 0) sleep(2);
    return ((__typeof__(&fdatasync))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
