/*
 * Reads and writes with each function of guest/fathom.h, each at a place of its own of a disk, and
 * checks the data and the thread's I/O priority. `hints DISK` exits with 0 if all is right.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fathom.h"

#define SIZE 4096
#define STEP (64 << 10)

static void check(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        exit(1);
    }
}

static long priority(void) { return syscall(SYS_ioprio_get, 1, 0); }

int main(int count, char **arguments)
{
    int disk, buffered;
    long before, context = 0;
    char *buffer, *other;
    struct iovec vector[2];
    struct iocb block, *blocks[1] = {&block};
    struct io_event event;

    check(count == 2, "usage: hints DISK");
    disk = open(arguments[1], O_RDWR | O_DIRECT);
    buffered = open(arguments[1], O_RDONLY);
    check(disk >= 0 && buffered >= 0, "open");
    check(posix_memalign((void **)&buffer, SIZE, 2 * SIZE) == 0, "memory");
    check(posix_memalign((void **)&other, SIZE, 2 * SIZE) == 0, "memory");
    vector[0] = (struct iovec){buffer, SIZE};
    vector[1] = (struct iovec){buffer + SIZE, SIZE};
    before = priority();
    for (int i = 0; i < 2 * SIZE; i++)
        buffer[i] = (char)(i * 7 + i / 251);
    memcpy(other, buffer, 2 * SIZE);

    /* Writes at the places 1, 3, 5 and 7, and what they have written. */
    check(lseek(disk, 1 * STEP, SEEK_SET) >= 0, "seek");
    check(iwrite(disk, buffer, SIZE, 2) == SIZE, "iwrite");
    check(lseek(disk, 3 * STEP, SEEK_SET) >= 0, "seek");
    check(iwritev(disk, vector, 2, 4) == 2 * SIZE, "iwritev");
    check(ipwrite(disk, buffer, SIZE, 5 * STEP, FATHOM_UNIQUE) == SIZE, "ipwrite");
    check(ipwritev(disk, vector, 2, 7 * STEP, FATHOM_CLASS_MAX) == 2 * SIZE, "ipwritev");
    for (int place = 1; place <= 7; place += 2) {
        int size = place == 3 || place == 7 ? 2 * SIZE : SIZE;

        memset(buffer, 0, 2 * SIZE);
        check(pread(disk, buffer, size, place * STEP) == size, "pread");
        check(memcmp(buffer, other, size) == 0, "other data");
    }

    /* Reads at the places 10, 12, 14 and 16. */
    check(lseek(disk, 10 * STEP, SEEK_SET) >= 0, "seek");
    check(iread(disk, buffer, SIZE, 1) == SIZE, "iread");
    check(lseek(disk, 12 * STEP, SEEK_SET) >= 0, "seek");
    check(ireadv(disk, vector, 2, 3) == 2 * SIZE, "ireadv");
    check(ipread(disk, buffer, SIZE, 14 * STEP, 5) == SIZE, "ipread");
    check(ipreadv(disk, vector, 2, 16 * STEP, 0) == 2 * SIZE, "ipreadv");

    /* A read through the page cache at 18. */
    check(posix_fadvise(buffered, 0, 0, POSIX_FADV_DONTNEED) == 0, "advice");
    check(posix_fadvise(buffered, 0, 0, POSIX_FADV_RANDOM) == 0, "advice");
    check(ipread(buffered, buffer, SIZE, 18 * STEP, 3) == SIZE, "buffered");

    /* libaio at 20, if the kernel carries the hint. */
    memset(&block, 0, sizeof(block));
    block.aio_lio_opcode = IOCB_CMD_PREAD;
    block.aio_fildes = disk;
    block.aio_buf = (uintptr_t)buffer;
    block.aio_nbytes = SIZE;
    block.aio_offset = 20 * STEP;
    block.aio_flags = IOCB_FLAG_IOPRIO;
    block.aio_reqprio = fathom_ioprio(2);
    check(syscall(SYS_io_setup, 1, &context) == 0, "io_setup");
    if (syscall(SYS_io_submit, context, 1, blocks) == 1)
        check(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1 && event.res == SIZE, "libaio");

    /* Out of range, after errors, and after all: no hint. */
    check(ipread(disk, buffer, SIZE, 22 * STEP, 33) == SIZE, "ipread, 33");
    check(ipread(disk, buffer, SIZE, 24 * STEP, -1) == SIZE, "ipread, -1");
    check(iread(-1, buffer, SIZE, 4) == -1 && errno == EBADF, "no file");
    check(pread(disk, buffer, SIZE, 26 * STEP) == SIZE, "pread");
    check(priority() == before, "another priority");
    puts("right");
    return 0;
}
