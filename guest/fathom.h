/*
 * Hints of a guest's program to Fathom, the server of its virtual disk: the I/O class of single
 * reads and writes. docs/hints.md of Fathom describes them.
 *
 *   #include "fathom.h"
 *
 *   n = iread(fd, buffer, size, 4);                     read(2), with the I/O class 4
 *   n = ipwrite(fd, buffer, size, offset, 0);           pwrite(2), not worth a place in a cache
 *   n = iwrite(fd, buffer, size, FATHOM_UNIQUE);        content that is nowhere else
 *   sqe->ioprio = fathom_ioprio(4);                     io_uring
 *   iocb->aio_reqprio = fathom_ioprio(4);               libaio, with IOCB_FLAG_IOPRIO
 *
 * Without Fathom, or with a kernel that does not carry hints (some before 6.5), the functions read
 * and write like those of the C library. A hint changes neither data nor results.
 *
 * The class of a request reaches the disk with what the calling thread submits: all reads, and
 * writes with O_DIRECT, O_SYNC or O_DSYNC. Other writes reach the disk later, without a class; of
 * these, fcntl(F_SET_RW_HINT) carries the expected lifetime.
 *
 * The header has no parts beyond it, and no state. Each function sets the thread's I/O priority,
 * and sets it back: four system calls in place of one, about half a microsecond. A program that
 * changes the priority of its threads in signal handlers must not be interrupted there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef FATHOM_H
#define FATHOM_H

#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The class of what a cache should keep longest: as long as metadata of file systems. */
#define FATHOM_CLASS_MAX 31
/* The content is unique (encrypted or compressed): looking for the same elsewhere is vain. */
#define FATHOM_UNIQUE 32

/* The argument that precedes the class of a system call, for who intercepts system calls. */
#define FATHOM_MAGIC 0x6661746d68696e74L

/* IOPRIO_CLASS_BE, the level of a thread that has set none, and the bit of Fathom's hints among the
 * ten bits for hints of a priority. */
#define FATHOM_PRIORITY_ (2 << 13 | 4)
#define FATHOM_HINT_ (1 << 9)

/* The I/O priority of a request of this class; 0, which is none, for a class out of range. */
static inline int fathom_ioprio(int io_class)
{
    if (io_class < 0 || io_class > FATHOM_UNIQUE)
        return 0;
    return FATHOM_PRIORITY_ | (FATHOM_HINT_ | io_class) << 3;
}

/* Sets the thread's I/O priority. Returns the one before, or -1 if nothing has changed. */
static inline int fathom_begin_(int io_class)
{
    int saved = errno, wanted = fathom_ioprio(io_class), before = -1;

    if (wanted != 0) {
        before = (int)syscall(SYS_ioprio_get, 1, 0);
        if (before >= 0 && syscall(SYS_ioprio_set, 1, 0, wanted) != 0)
            before = -1;
    }
    errno = saved;
    return before;
}

static inline void fathom_end_(int before)
{
    int saved = errno;

    if (before >= 0) {
        /* A priority without a class is reported with a level, and set without one. */
        if (before >> 13 == 0)
            before = 0;
        syscall(SYS_ioprio_set, 1, 0, before);
    }
    errno = saved;
}

/* read(2) with an I/O class. */
static inline ssize_t iread(int fd, void *buffer, size_t size, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_read, fd, buffer, size, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* write(2) with an I/O class. */
static inline ssize_t iwrite(int fd, const void *buffer, size_t size, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_write, fd, buffer, size, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* readv(2) with an I/O class. */
static inline ssize_t ireadv(int fd, const struct iovec *vector, int length, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_readv, fd, vector, (long)length, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* writev(2) with an I/O class. */
static inline ssize_t iwritev(int fd, const struct iovec *vector, int length, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_writev, fd, vector, (long)length, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* Calls with an offset have a register for it only where a register has 64 bits. */
#if defined(__LP64__)

/* pread(2) with an I/O class. */
static inline ssize_t ipread(int fd, void *buffer, size_t size, off_t offset, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_pread64, fd, buffer, size, offset, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* pwrite(2) with an I/O class. */
static inline ssize_t ipwrite(int fd, const void *buffer, size_t size, off_t offset, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count = syscall(SYS_pwrite64, fd, buffer, size, offset, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* preadv(2) with an I/O class. The kernel does not use the upper half of a 64-bit offset, whose
 * place the magic number takes. */
static inline ssize_t ipreadv(int fd, const struct iovec *vector, int length, off_t offset, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count =
        syscall(SYS_preadv, fd, vector, (long)length, offset, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

/* pwritev(2) with an I/O class. */
static inline ssize_t ipwritev(int fd, const struct iovec *vector, int length, off_t offset, int io_class)
{
    int before = fathom_begin_(io_class);
    ssize_t count =
        syscall(SYS_pwritev, fd, vector, (long)length, offset, FATHOM_MAGIC, (long)io_class);

    fathom_end_(before);
    return count;
}

#endif /* __LP64__ */
#endif /* FATHOM_H */
