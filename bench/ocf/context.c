/*
 * What OCF asks of its environment: memory, volumes, threads, a cleaner and a log. See plugin.c.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "context.h"

ocf_queue_t cleaner_queue;

/* Data. */

static ctx_data_t *data_alloc(uint32_t pages)
{
	struct data *data = malloc(sizeof(*data));

	if (!data)
		return NULL;
	*data = (struct data) { .owned = true };
	if (posix_memalign((void **)&data->bytes, BLOCK, (size_t)pages * BLOCK)) {
		free(data);
		return NULL;
	}
	return data;
}

static void data_free(ctx_data_t *opaque)
{
	struct data *data = opaque;

	if (data && data->owned)
		free(data->bytes);
	free(data);
}

static int data_mlock(ctx_data_t *data)
{
	return 0;
}

static void data_nothing(ctx_data_t *data)
{
}

static uint32_t data_read(void *target, ctx_data_t *opaque, uint32_t size)
{
	struct data *data = opaque;

	memcpy(target, data->bytes + data->position, size);
	data->position += size;
	return size;
}

static uint32_t data_write(ctx_data_t *opaque, const void *source, uint32_t size)
{
	struct data *data = opaque;

	memcpy(data->bytes + data->position, source, size);
	data->position += size;
	return size;
}

static uint32_t data_zero(ctx_data_t *opaque, uint32_t size)
{
	struct data *data = opaque;

	memset(data->bytes + data->position, 0, size);
	data->position += size;
	return size;
}

static uint32_t data_seek(ctx_data_t *opaque, ctx_data_seek_t seek, uint32_t offset)
{
	struct data *data = opaque;

	data->position = seek == ctx_data_seek_begin ? offset : data->position + offset;
	return offset;
}

static uint64_t data_copy(ctx_data_t *target, ctx_data_t *source, uint64_t to, uint64_t from, uint64_t bytes)
{
	memcpy(((struct data *)target)->bytes + to, ((struct data *)source)->bytes + from, bytes);
	return bytes;
}

/* Volumes: a file, or none. */

struct volume {
	int fd; /* -1 for a volume without data */
	uint64_t size;
};

static int volume_open(ocf_volume_t volume, void *params)
{
	struct volume *own = ocf_volume_get_priv(volume);
	const char *name = ocf_uuid_to_str(ocf_volume_get_uuid(volume));
	struct stat stat;

	if (!strncmp(name, "null:", 5)) {
		*own = (struct volume) { .fd = -1, .size = strtoull(name + 5, NULL, 10) };
		return 0;
	}
	own->fd = open(name, O_RDWR | O_CLOEXEC);
	if (own->fd < 0 || fstat(own->fd, &stat)) {
		nbdkit_error("cannot open %s: %m", name);
		return -OCF_ERR_INVAL_VOLUME_TYPE;
	}
	own->size = stat.st_size;
	return 0;
}

static void volume_close(ocf_volume_t volume)
{
	struct volume *own = ocf_volume_get_priv(volume);

	if (own->fd >= 0)
		close(own->fd);
}

/* Reads or writes all of a range. */
static int transfer(struct volume *own, int direction, char *bytes, uint64_t size, uint64_t address)
{
	if (own->fd < 0) {
		if (direction == OCF_READ)
			memset(bytes, 0, size);
		return 0;
	}
	while (size) {
		ssize_t done = direction == OCF_WRITE ? pwrite(own->fd, bytes, size, address)
				: pread(own->fd, bytes, size, address);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return -OCF_ERR_IO;
		bytes += done;
		address += done;
		size -= done;
	}
	return 0;
}

static void volume_forward_io(ocf_volume_t volume, ocf_forward_token_t token, int direction,
		uint64_t address, uint64_t size, uint64_t offset)
{
	struct data *data = ocf_forward_get_data(token);

	ocf_forward_end(token, transfer(ocf_volume_get_priv(volume), direction, data->bytes + offset, size, address));
}

static void volume_forward_flush(ocf_volume_t volume, ocf_forward_token_t token)
{
	struct volume *own = ocf_volume_get_priv(volume);

	ocf_forward_end(token, own->fd >= 0 && fdatasync(own->fd) ? -OCF_ERR_IO : 0);
}

static void volume_forward_discard(ocf_volume_t volume, ocf_forward_token_t token, uint64_t address, uint64_t size)
{
	ocf_forward_end(token, 0);
}

static void volume_forward_zeros(ocf_volume_t volume, ocf_forward_token_t token, uint64_t address, uint64_t size)
{
	static char zeros[1 << 16];
	int error = 0;

	while (size && !error) {
		uint64_t piece = size < sizeof(zeros) ? size : sizeof(zeros);

		error = transfer(ocf_volume_get_priv(volume), OCF_WRITE, zeros, piece, address);
		address += piece;
		size -= piece;
	}
	ocf_forward_end(token, error);
}

static unsigned int volume_max_io(ocf_volume_t volume)
{
	return REQUEST_MAX;
}

static uint64_t volume_length(ocf_volume_t volume)
{
	return ((struct volume *)ocf_volume_get_priv(volume))->size;
}

const struct ocf_volume_properties volume_properties = {
	.name = "file",
	.volume_priv_size = sizeof(struct volume),
	.ops = {
		.open = volume_open,
		.close = volume_close,
		.forward_io = volume_forward_io,
		.forward_flush = volume_forward_flush,
		.forward_discard = volume_forward_discard,
		.forward_write_zeros = volume_forward_zeros,
		.get_max_io_size = volume_max_io,
		.get_length = volume_length,
	},
};

/* Threads that run a queue or the cleaner when they are kicked. */

static void *work(void *opaque)
{
	struct worker *worker = opaque;
	struct timespec until;

	pthread_mutex_lock(&worker->mutex);
	while (!worker->ended) {
		if (!worker->kicked && worker->interval_ms) {
			clock_gettime(CLOCK_REALTIME, &until);
			until.tv_sec += worker->interval_ms / 1000;
			until.tv_nsec += worker->interval_ms % 1000 * 1000000L;
			until.tv_sec += until.tv_nsec / 1000000000L;
			until.tv_nsec %= 1000000000L;
			if (pthread_cond_timedwait(&worker->changed, &worker->mutex, &until) == ETIMEDOUT)
				worker->kicked = true;
		} else if (!worker->kicked) {
			pthread_cond_wait(&worker->changed, &worker->mutex);
		}
		if (!worker->kicked || worker->ended)
			continue;
		worker->kicked = false;
		pthread_mutex_unlock(&worker->mutex);
		if (worker->queue)
			ocf_queue_run(worker->queue);
		else if (cleaner_queue)
			ocf_cleaner_run(worker->cleaner, cleaner_queue);
		pthread_mutex_lock(&worker->mutex);
	}
	pthread_mutex_unlock(&worker->mutex);
	return NULL;
}

struct worker *worker_start(ocf_queue_t queue, ocf_cleaner_t cleaner)
{
	struct worker *worker = calloc(1, sizeof(*worker));

	if (!worker)
		return NULL;
	worker->queue = queue;
	worker->cleaner = cleaner;
	pthread_mutex_init(&worker->mutex, NULL);
	pthread_cond_init(&worker->changed, NULL);
	if (pthread_create(&worker->thread, NULL, work, worker)) {
		free(worker);
		return NULL;
	}
	return worker;
}

void worker_kick(struct worker *worker)
{
	pthread_mutex_lock(&worker->mutex);
	worker->kicked = true;
	pthread_cond_signal(&worker->changed);
	pthread_mutex_unlock(&worker->mutex);
}

void worker_end(struct worker *worker)
{
	pthread_mutex_lock(&worker->mutex);
	worker->ended = true;
	pthread_cond_signal(&worker->changed);
	pthread_mutex_unlock(&worker->mutex);
	pthread_join(worker->thread, NULL);
	free(worker);
}
static void cleaner_done(ocf_cleaner_t cleaner, uint32_t interval_ms)
{
	struct worker *worker = ocf_cleaner_get_priv(cleaner);

	pthread_mutex_lock(&worker->mutex);
	worker->interval_ms = interval_ms ? interval_ms : 1;
	pthread_cond_signal(&worker->changed);
	pthread_mutex_unlock(&worker->mutex);
}

static int cleaner_init(ocf_cleaner_t cleaner)
{
	struct worker *worker = worker_start(NULL, cleaner);

	if (!worker)
		return -OCF_ERR_NO_MEM;
	ocf_cleaner_set_cmpl(cleaner, cleaner_done);
	ocf_cleaner_set_priv(cleaner, worker);
	return 0;
}

static void cleaner_kick(ocf_cleaner_t cleaner)
{
	worker_kick(ocf_cleaner_get_priv(cleaner));
}

static void cleaner_stop(ocf_cleaner_t cleaner)
{
	worker_end(ocf_cleaner_get_priv(cleaner));
}

static int log_print(ocf_logger_t logger, ocf_logger_lvl_t level, const char *format, va_list arguments)
{
	return level <= log_warn ? vfprintf(stderr, format, arguments) : 0;
}

static int log_stack(ocf_logger_t logger)
{
	return 0;
}

const struct ocf_ctx_config ctx_config = {
	.name = "bench/cache",
	.ops = {
		.data = {
			.alloc = data_alloc, .free = data_free, .mlock = data_mlock, .munlock = data_nothing,
			.read = data_read, .write = data_write, .zero = data_zero, .seek = data_seek,
			.copy = data_copy, .secure_erase = data_nothing,
		},
		.cleaner = { .init = cleaner_init, .kick = cleaner_kick, .stop = cleaner_stop },
		.logger = { .print = log_print, .dump_stack = log_stack },
	},
};
