/* Preloaded into a process under test: records its file system calls, and makes some of them fail.
 *
 * Owns: the rules given to shim_set(), the record. Must not: change a call that no rule matches.
 *
 * A rule is one line of seven fields between tabs: call, pattern, first, count, action, argument.
 *   call      the name without 64: open write pwrite read pread fsync fdatasync rename unlink rmdir mkdir fallocate
 *             ftruncate chmod close stat fstat opendir thread; or "change": every one that changes something on a disk
 *   pattern   fnmatch() pattern of the path (of the target, for a rename)
 *   first     the first matching call that is meant, from 1; count: how many, 0 for all from there on
 *   action    errno N: fails with N | short N: moves at most N bytes | hang F: opens the FIFO F.reached for writing, then
 *             the FIFO F for reading: the tester learns that it hangs, and lets it go on | kill N: the process gets signal N
 * `record FILE SCOPE` (tabs) writes every call on paths below SCOPE to FILE; `keep DIR` copies each synced file there.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_RULES 32

struct rule {
    char call[16], pattern[PATH_MAX], argument[PATH_MAX];
    enum { FAIL, SHORT, HANG, KILL } action;
    long first, count, seen;
};

static struct rule rules[MAX_RULES];
static int rule_count, record_fd = -1, sequence;
static char scope[PATH_MAX], keep_dir[PATH_MAX];
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))

static int raw_open(const char *path, int flags) { return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600); }

static void raw_close(int fd) { syscall(SYS_close, fd); }

/* Replaces all rules; an empty text ends recording too. Returns the number of rules, or -1 for a line it cannot read. */
int shim_set(const char *text) {
    pthread_mutex_lock(&guard);
    rule_count = 0;
    if (record_fd >= 0) raw_close(record_fd);
    record_fd = -1;
    scope[0] = keep_dir[0] = 0;
    char *copy = strdup(text), *rest = copy, *line;
    int bad = 0;
    while ((line = strsep(&rest, "\n"))) {
        char *field[7] = {0};
        int n = 0;
        if (!*line) continue;
        for (char *part; n < 7 && (part = strsep(&line, "\t"));) field[n++] = part;
        if (n == 3 && !strcmp(field[0], "record")) {
            record_fd = raw_open(field[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC);
            snprintf(scope, sizeof scope, "%s", field[2]);
        } else if (n == 2 && !strcmp(field[0], "keep")) {
            snprintf(keep_dir, sizeof keep_dir, "%s", field[1]);
        } else if (n == 6 && rule_count < MAX_RULES) {
            struct rule *rule = &rules[rule_count++];
            memset(rule, 0, sizeof *rule);
            snprintf(rule->call, sizeof rule->call, "%s", field[0]);
            snprintf(rule->pattern, sizeof rule->pattern, "%s", field[1]);
            rule->first = atol(field[2]);
            rule->count = atol(field[3]);
            rule->action = !strcmp(field[4], "short")  ? SHORT
                           : !strcmp(field[4], "hang") ? HANG
                           : !strcmp(field[4], "kill") ? KILL
                                                       : FAIL;
            snprintf(rule->argument, sizeof rule->argument, "%s", field[5]);
        } else {
            bad = 1;
        }
    }
    free(copy);
    int result = bad ? -1 : rule_count;
    pthread_mutex_unlock(&guard);
    return result;
}

/* How many calls rule number `index` has matched. */
long shim_seen(int index) {
    pthread_mutex_lock(&guard);
    long seen = rules[index].seen;
    pthread_mutex_unlock(&guard);
    return seen;
}

/* A line of the tester's own in the record. */
void shim_mark(const char *text) {
    pthread_mutex_lock(&guard);
    if (record_fd >= 0) {
        char line[256];
        int len = snprintf(line, sizeof line, "%d\tmark\t%s\t\t0\t0\t0\n", ++sequence, text);
        if (syscall(SYS_write, record_fd, line, len) < 0) abort();
    }
    pthread_mutex_unlock(&guard);
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, buffer, PATH_MAX - 1);
    buffer[len < 0 ? 0 : len] = 0;
    return buffer;
}

static const char *path_at(int dir, const char *path, char *buffer) {
    if (path[0] == '/') return path;
    char base[PATH_MAX];
    if (dir == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        path_of(dir, base);
    }
    snprintf(buffer, PATH_MAX, "%.2000s/%.2000s", base, path);
    return buffer;
}

static void hang(const char *fifo) {
    char reached[PATH_MAX + 16];
    snprintf(reached, sizeof reached, "%s.reached", fifo);
    int fd = raw_open(reached, O_WRONLY);
    if (fd >= 0) raw_close(fd);
    fd = raw_open(fifo, O_RDONLY);
    if (fd >= 0) raw_close(fd);
}

static int meant(const struct rule *rule, const char *call) {
    if (strcmp(rule->call, "change")) return !strcmp(rule->call, call);
    return strcmp(call, "read") && strcmp(call, "pread") && strcmp(call, "stat") && strcmp(call, "fstat") &&
           strcmp(call, "opendir") && strcmp(call, "close") && strcmp(call, "thread");
}

/* The errno this call shall fail with, or 0. Cuts *bytes where a rule says so. */
static int apply(const char *call, const char *path, size_t *bytes) {
    int result = 0;
    char wait_for[PATH_MAX] = "";
    pthread_mutex_lock(&guard);
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (!meant(rule, call) || fnmatch(rule->pattern, path, 0)) continue;
        rule->seen++;
        if (rule->seen < rule->first || (rule->count && rule->seen >= rule->first + rule->count)) continue;
        if (rule->action == SHORT) {
            size_t most = (size_t)atol(rule->argument);
            if (bytes && *bytes > most) *bytes = most;
        } else if (rule->action == KILL) {
            kill(getpid(), atoi(rule->argument));
        } else if (rule->action == HANG) {
            snprintf(wait_for, sizeof wait_for, "%s", rule->argument);
        } else if (!result) {
            result = atoi(rule->argument);
        }
    }
    pthread_mutex_unlock(&guard);
    if (wait_for[0]) hang(wait_for);
    return result;
}

static void keep_copy(int number, const char *path) {
    char name[PATH_MAX + 32], block[1 << 16];
    snprintf(name, sizeof name, "%s/%d", keep_dir, number);
    int from = raw_open(path, O_RDONLY | O_CLOEXEC), to = raw_open(name, O_WRONLY | O_CREAT | O_CLOEXEC);
    for (ssize_t n; from >= 0 && to >= 0 && (n = syscall(SYS_read, from, block, sizeof block)) > 0;)
        if (syscall(SYS_write, to, block, n) != n) abort();
    if (from >= 0) raw_close(from);
    if (to >= 0) raw_close(to);
}

/* number, call, path, second path, offset or flags, bytes asked or inode, result (bytes, 0, or minus the errno) */
static void record(const char *call, const char *path, const char *second, long long offset, long long bytes,
                   long long result) {
    int saved = errno;
    pthread_mutex_lock(&guard);
    if (record_fd >= 0 && (!strncmp(path, scope, strlen(scope)) || !strcmp(call, "thread"))) {
        char line[2 * PATH_MAX + 128], code[24];
        int number = ++sequence;
        snprintf(code, sizeof code, "%lld", result < 0 ? -(long long)saved : result);
        int len = snprintf(line, sizeof line, "%d\t%s\t%s\t%s\t%lld\t%lld\t%s\n", number, call, path, second, offset,
                           bytes, code);
        if (syscall(SYS_write, record_fd, line, len) < 0) abort();
        struct stat found;
        if (keep_dir[0] && result >= 0 && (!strcmp(call, "fsync") || !strcmp(call, "fdatasync")) &&
            !lstat(path, &found) && S_ISREG(found.st_mode))
            keep_copy(number, path);
    }
    pthread_mutex_unlock(&guard);
    errno = saved;
}

#define FAILS(call, path, bytes)                                      \
    do {                                                              \
        int code_ = apply(call, path, bytes);                         \
        if (code_) {                                                  \
            errno = code_;                                            \
            record(call, path, "", 0, 0, -1);                         \
            errno = code_;                                            \
            return -1;                                                \
        }                                                             \
    } while (0)

static int open_any(int dir, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *full = path_at(dir, path, buffer);
    FAILS("open", full, NULL);
    /* as the C library does: large files are always allowed */
    int fd = (int)syscall(SYS_openat, dir, path, flags | O_LARGEFILE, mode);
    struct stat found;
    int saved = errno;
    long long inode = fd >= 0 && !fstat(fd, &found) ? (long long)found.st_ino : 0;
    errno = saved;
    record("open", full, "", flags, inode, fd);
    return fd;
}

#define MODE_OF(flags)                         \
    mode_t mode = 0;                           \
    if (flags & (O_CREAT | __O_TMPFILE)) {     \
        va_list list;                          \
        va_start(list, flags);                 \
        mode = va_arg(list, mode_t);           \
        va_end(list);                          \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_any(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE_OF(flags) return open_any(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE_OF(flags) return open_any(dir, path, flags, mode); }

#define ON_FD(call, fd, bytes)                     \
    char buffer_[PATH_MAX];                        \
    const char *path_ = path_of(fd, buffer_);      \
    FAILS(call, path_, bytes)

ssize_t write(int fd, const void *data, size_t bytes) {
    size_t asked = bytes;
    ON_FD("write", fd, &bytes);
    ssize_t n = syscall(SYS_write, fd, data, bytes);
    record("write", path_, "", -1, asked, n);
    return n;
}

static ssize_t pwrite_any(int fd, const void *data, size_t bytes, off_t offset) {
    size_t asked = bytes;
    ON_FD("pwrite", fd, &bytes);
    ssize_t n = syscall(SYS_pwrite64, fd, data, bytes, offset);
    record("pwrite", path_, "", offset, asked, n);
    return n;
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return pwrite_any(fd, data, bytes, offset); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) { return pwrite_any(fd, data, bytes, offset); }

ssize_t writev(int fd, const struct iovec *pieces, int count) {
    ON_FD("write", fd, NULL);
    ssize_t n = syscall(SYS_writev, fd, pieces, count);
    record("write", path_, "", -1, n, n);
    return n;
}

ssize_t read(int fd, void *data, size_t bytes) {
    size_t asked = bytes;
    ON_FD("read", fd, &bytes);
    ssize_t n = syscall(SYS_read, fd, data, bytes);
    record("read", path_, "", -1, asked, n);
    return n;
}

static ssize_t pread_any(int fd, void *data, size_t bytes, off_t offset) {
    size_t asked = bytes;
    ON_FD("pread", fd, &bytes);
    ssize_t n = syscall(SYS_pread64, fd, data, bytes, offset);
    record("pread", path_, "", offset, asked, n);
    return n;
}
ssize_t pread(int fd, void *data, size_t bytes, off_t offset) { return pread_any(fd, data, bytes, offset); }
ssize_t pread64(int fd, void *data, size_t bytes, off_t offset) { return pread_any(fd, data, bytes, offset); }

int fsync(int fd) {
    ON_FD("fsync", fd, NULL);
    int result = (int)syscall(SYS_fsync, fd);
    record("fsync", path_, "", 0, 0, result);
    return result;
}

int fdatasync(int fd) {
    ON_FD("fdatasync", fd, NULL);
    int result = (int)syscall(SYS_fdatasync, fd);
    record("fdatasync", path_, "", 0, 0, result);
    return result;
}

int close(int fd) {
    char buffer[PATH_MAX] = "";
    if (fd > 2) path_of(fd, buffer);
    int code = apply("close", buffer, NULL);
    int result = (int)syscall(SYS_close, fd); /* as Linux does: the descriptor is gone in any case */
    if (code) {
        errno = code;
        return -1;
    }
    return result;
}

static int rename_any(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char from_buffer[PATH_MAX], to_buffer[PATH_MAX];
    const char *source = path_at(from_dir, from, from_buffer), *target = path_at(to_dir, to, to_buffer);
    FAILS("rename", target, NULL);
    int result = (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    record("rename", source, target, 0, 0, result);
    return result;
}
int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return rename_any(a, from, b, to, flags);
}

static int unlink_any(int dir, const char *path, int flags) {
    char buffer[PATH_MAX];
    const char *full = path_at(dir, path, buffer), *call = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    FAILS(call, full, NULL);
    int result = (int)syscall(SYS_unlinkat, dir, path, flags);
    record(call, full, "", 0, 0, result);
    return result;
}
int unlink(const char *path) { return unlink_any(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlink_any(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int dir, const char *path, int flags) { return unlink_any(dir, path, flags); }

int mkdir(const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    const char *full = path_at(AT_FDCWD, path, buffer);
    FAILS("mkdir", full, NULL);
    int result = (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    record("mkdir", full, "", 0, 0, result);
    return result;
}

static int fallocate_any(int fd, int mode, off_t offset, off_t bytes) {
    ON_FD("fallocate", fd, NULL);
    int result = (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    record("fallocate", path_, "", offset, bytes, result);
    return result;
}
int fallocate(int fd, int mode, off_t offset, off_t bytes) { return fallocate_any(fd, mode, offset, bytes); }
int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) { return fallocate_any(fd, mode, offset, bytes); }

static int ftruncate_any(int fd, off_t bytes) {
    ON_FD("ftruncate", fd, NULL);
    int result = (int)syscall(SYS_ftruncate, fd, bytes);
    record("ftruncate", path_, "", 0, bytes, result);
    return result;
}
int ftruncate(int fd, off_t bytes) { return ftruncate_any(fd, bytes); }
int ftruncate64(int fd, off64_t bytes) { return ftruncate_any(fd, bytes); }

int chmod(const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    const char *full = path_at(AT_FDCWD, path, buffer);
    FAILS("chmod", full, NULL);
    return (int)syscall(SYS_fchmodat, AT_FDCWD, path, mode);
}
int fchmod(int fd, mode_t mode) {
    ON_FD("chmod", fd, NULL);
    return (int)syscall(SYS_fchmod, fd, mode);
}

#define STAT(path)                                             \
    char buffer[PATH_MAX];                                     \
    const char *full = path_at(AT_FDCWD, path, buffer);        \
    FAILS("stat", full, NULL)

int stat64(const char *path, struct stat64 *found) {
    STAT(path);
    return REAL("stat64", int (*)(const char *, struct stat64 *))(path, found);
}
int lstat64(const char *path, struct stat64 *found) {
    STAT(path);
    return REAL("lstat64", int (*)(const char *, struct stat64 *))(path, found);
}
int statx(int dir, const char *path, int flags, unsigned mask, struct statx *found) {
    char buffer[PATH_MAX];
    /* Rust's library asks with NULL whether there is statx; the header says that nobody does, hence volatile */
    const char *volatile given = path;
    if (!given) return (int)syscall(SYS_statx, dir, NULL, flags, mask, found);
    const char *full = *path ? path_at(dir, path, buffer) : path_of(dir, buffer);
    FAILS(*path ? "stat" : "fstat", full, NULL);
    return (int)syscall(SYS_statx, dir, path, flags, mask, found);
}

DIR *opendir(const char *path) {
    char buffer[PATH_MAX];
    const char *full = path_at(AT_FDCWD, path, buffer);
    int code = apply("opendir", full, NULL);
    if (code) {
        errno = code;
        return NULL;
    }
    return REAL("opendir", DIR *(*)(const char *))(path);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    int code = apply("thread", "thread", NULL);
    if (code) return code;
    return REAL("pthread_create", int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))(
        thread, attributes, start, argument);
}
