/* Records every change of files below a directory, in order, for tests/training_run/directory/power_cut/simulated_disk.py.

   Preloaded into a process (LD_PRELOAD). RECORDED_ROOT: the directory, as an absolute path without links.
   RECORDED_JOURNAL: the file that the records are appended to. A record is a `struct header`, two paths and a payload.
   A change is recorded after the system call has succeeded, under a lock, so that the records are in the order of the
   changes. Memory maps that can write to such a file are recorded as unsupported. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct header {
    char kind;
    char padding[7];
    int64_t inode, offset, length;
    int32_t first, second;
} __attribute__((packed));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1;
static char root[PATH_MAX];
static size_t root_length;

static void unlock_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void start(void) {
    const char *directory = getenv("RECORDED_ROOT"), *path = getenv("RECORDED_JOURNAL");
    if (directory == NULL || path == NULL) return;
    root_length = strlen(directory);
    if (root_length >= sizeof root) abort();
    memcpy(root, directory, root_length + 1);
    journal = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (journal < 0) abort();
    int high = (int)syscall(SYS_fcntl, journal, F_DUPFD_CLOEXEC, 1000);
    if (high >= 0) {
        syscall(SYS_close, journal);
        journal = high;
    }
    pthread_atfork(NULL, NULL, unlock_in_child);
}

static int below(const char *path) {
    return journal >= 0 && strncmp(path, root, root_length) == 0 && (path[root_length] == 0 || path[root_length] == '/');
}

/* Write the absolute path of `path` to `out`, and return whether it lies below the root. */
static int resolve(int directory, const char *path, char *out) {
    if (journal < 0 || path == NULL) return 0;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return 0;
        strcpy(out, path);
        return below(out);
    }
    char base[PATH_MAX];
    if (directory == AT_FDCWD) {
        if (getcwd(base, sizeof base) == NULL) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t size = readlink(link, base, sizeof base - 1);
        if (size < 0) return 0;
        base[size] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    return below(out);
}

/* Return whether a descriptor belongs to a file or directory below the root, with its path and inode. */
static int watched(int descriptor, char *path, int64_t *inode) {
    if (journal < 0 || descriptor == journal) return 0;
    int saved = errno;
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    int found = 0;
    if (size > 0) {
        path[size] = 0;
        found = below(path) && fstat(descriptor, &status) == 0;
        if (found) *inode = (int64_t)status.st_ino;
    }
    errno = saved;
    return found;
}

static void record(char kind, int64_t inode, int64_t offset, const char *first, const char *second,
                   const void *data, size_t length) {
    int saved = errno;
    struct header header = {.kind = kind, .inode = inode, .offset = offset, .length = (int64_t)length};
    header.first = first ? (int32_t)strlen(first) : 0;
    header.second = second ? (int32_t)strlen(second) : 0;
    struct iovec parts[4] = {
        {&header, sizeof header}, {(void *)first, (size_t)header.first}, {(void *)second, (size_t)header.second},
        {(void *)data, data ? length : 0},
    };
    size_t total = parts[0].iov_len + parts[1].iov_len + parts[2].iov_len + parts[3].iov_len;
    if (syscall(SYS_writev, journal, parts, 4) != (long)total) abort();
    errno = saved;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int64_t inode_of(int descriptor) {
    struct stat status;
    return fstat(descriptor, &status) == 0 ? (int64_t)status.st_ino : -1;
}

/* 'o': a file was created, or opened for writing; the offset tells whether it was emptied. */
static int opened(int directory, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    if ((flags & O_TMPFILE) == O_TMPFILE || !writes || !resolve(directory, path, full))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    pthread_mutex_lock(&lock);
    int descriptor = (int)syscall(SYS_openat, directory, path, flags, mode);
    if (descriptor >= 0) record('o', inode_of(descriptor), (flags & O_TRUNC) != 0, full, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return descriptor;
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE_OF(flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE_OF(flags) return opened(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

/* 'w': bytes at an offset. */
ssize_t write(int descriptor, const void *data, size_t length) {
    char path[PATH_MAX];
    int64_t inode;
    if (!watched(descriptor, path, &inode)) return syscall(SYS_write, descriptor, data, length);
    pthread_mutex_lock(&lock);
    ssize_t written = syscall(SYS_write, descriptor, data, length);
    if (written > 0)
        record('w', inode, lseek(descriptor, 0, SEEK_CUR) - written, path, NULL, data, (size_t)written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    int64_t inode;
    if (!watched(descriptor, path, &inode)) return syscall(SYS_writev, descriptor, parts, count);
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t written = write(descriptor, parts[i].iov_base, parts[i].iov_len);
        if (written < 0) return total ? total : written;
        total += written;
        if ((size_t)written < parts[i].iov_len) break;
    }
    return total;
}

static ssize_t written_at(int descriptor, const void *data, size_t length, off_t offset) {
    char path[PATH_MAX];
    int64_t inode;
    if (!watched(descriptor, path, &inode)) return syscall(SYS_pwrite64, descriptor, data, length, offset);
    pthread_mutex_lock(&lock);
    ssize_t written = syscall(SYS_pwrite64, descriptor, data, length, offset);
    if (written > 0) record('w', inode, offset, path, NULL, data, (size_t)written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t pwrite(int descriptor, const void *data, size_t length, off_t offset) {
    return written_at(descriptor, data, length, offset);
}
ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t offset) {
    return written_at(descriptor, data, length, offset);
}

/* 't': a new size. */
static int resized(int descriptor, off_t size) {
    char path[PATH_MAX];
    int64_t inode;
    if (!watched(descriptor, path, &inode)) return (int)syscall(SYS_ftruncate, descriptor, size);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_ftruncate, descriptor, size);
    if (result == 0) record('t', inode, size, path, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate(int descriptor, off_t size) { return resized(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { return resized(descriptor, size); }

/* 's': a file or directory was synced. */
static int synced(int descriptor, long call) {
    char path[PATH_MAX];
    int64_t inode;
    if (!watched(descriptor, path, &inode)) return (int)syscall(call, descriptor);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(call, descriptor);
    if (result == 0) record('s', inode, 0, path, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int descriptor) { return synced(descriptor, SYS_fsync); }
int fdatasync(int descriptor) { return synced(descriptor, SYS_fdatasync); }

/* 'r': renamed. */
static int renamed(int at, const char *from, int to_at, const char *to, unsigned flags) {
    char first[PATH_MAX], second[PATH_MAX];
    int here = resolve(at, from, first), there = resolve(to_at, to, second);
    if (!here && !there) return (int)syscall(SYS_renameat2, at, from, to_at, to, flags);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_renameat2, at, from, to_at, to, flags);
    if (result == 0) record(here && there && !(flags & ~RENAME_NOREPLACE) ? 'r' : '!', 0, 0, first, second, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int to_at, const char *to) { return renamed(at, from, to_at, to, 0); }
int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    return renamed(at, from, to_at, to, flags);
}

/* 'u': a file or directory was removed. 'm': a directory was created. */
static int removed(int at, const char *path, int flags) {
    char full[PATH_MAX];
    if (!resolve(at, path, full)) return (int)syscall(SYS_unlinkat, at, path, flags);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_unlinkat, at, path, flags);
    if (result == 0) record('u', 0, 0, full, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int created(int at, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!resolve(at, path, full)) return (int)syscall(SYS_mkdirat, at, path, mode);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_mkdirat, at, path, mode);
    if (result == 0) record('m', 0, 0, full, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int mkdir(const char *path, mode_t mode) { return created(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return created(at, path, mode); }

/* '!': a change that the simulation does not know. */
void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    char path[PATH_MAX];
    int64_t inode;
    if (descriptor >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) && watched(descriptor, path, &inode))
        record('!', inode, 0, path, NULL, NULL, 0);
    return (void *)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
}

int link(const char *from, const char *to) {
    char full[PATH_MAX];
    if (resolve(AT_FDCWD, to, full)) record('!', 0, 0, full, NULL, NULL, 0);
    return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
    char path[PATH_MAX];
    int64_t inode;
    if (watched(out, path, &inode)) record('!', inode, 0, path, NULL, NULL, 0);
    return syscall(SYS_copy_file_range, in, from, out, to, length, flags);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    char path[PATH_MAX];
    int64_t inode;
    if (watched(out, path, &inode)) record('!', inode, 0, path, NULL, NULL, 0);
    return syscall(SYS_sendfile, out, in, offset, count);
}
