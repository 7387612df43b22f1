/*
 * A plugin of nbdkit that serves a disk through OCF, the cache library of Open CAS, for bench/cache.
 *
 *   nbdkit ./nbdkit-ocf-plugin.so core=FILE cache=FILE [mode=wt|wb] [load=1] [cutoff=BYTES] [clean=SECONDS]
 *   nbdkit ./nbdkit-ocf-plugin.so core=null:BYTES cache=null: lines=NUMBER …
 *
 * The core (the slow disk) and the cache device are files, read and written through the page cache like those
 * of nbdkit's file plugin; a flush is fdatasync. A volume "null:BYTES" has no data and is for hit ratios: the
 * cache's is made just as long as `lines` cache lines need. Requests run in nbdkit's threads, and the
 * cleaner has a thread. With statistics=FILE, OCF's
 * counts of requests are written there as JSON at the orderly end.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <ocf/ocf.h>
#include <ocf/cleaning/alru.h>
/* Of the environment: both have a macro of this name. */
#undef container_of

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#define VOLUME_TYPE 1
/* The longest request to OCF, in bytes. Longer ones of a client are divided. */
#define REQUEST_MAX (128u << 10)
#define BLOCK 4096u
#define CORE_NAME "core"

/* The parameters. */
static const char *core_path, *cache_path, *statistics_path;
static uint64_t lines, cutoff;
static uint32_t clean_seconds;
static bool load, write_back;

static ocf_ctx_t ctx;
static ocf_cache_t cache;
static ocf_core_t core;
static ocf_queue_t mngt_queue, cleaner_queue;
static uint64_t core_size;

/* Data: a piece of memory with a position. */

struct data {
	char *bytes;
	uint32_t position;
	bool owned;
};

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

static const struct ocf_volume_properties volume_properties = {
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

struct worker {
	pthread_t thread;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	bool kicked, ended;
	ocf_queue_t queue;     /* NULL for the cleaner */
	ocf_cleaner_t cleaner;
	uint32_t interval_ms;  /* until the cleaner's next run; 0 for when it is kicked */
};

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

static struct worker *worker_start(ocf_queue_t queue, ocf_cleaner_t cleaner)
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

static void worker_kick(struct worker *worker)
{
	pthread_mutex_lock(&worker->mutex);
	worker->kicked = true;
	pthread_cond_signal(&worker->changed);
	pthread_mutex_unlock(&worker->mutex);
}

static void worker_end(struct worker *worker)
{
	pthread_mutex_lock(&worker->mutex);
	worker->ended = true;
	pthread_cond_signal(&worker->changed);
	pthread_mutex_unlock(&worker->mutex);
	pthread_join(worker->thread, NULL);
	free(worker);
}

/*
 * A lane: a queue of OCF and the thread of nbdkit that has it for one request. This thread runs the queue where it
 * holds none of OCF's locks: a kick only marks it. What comes while no request has the lane is for its worker.
 */
struct lane {
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	ocf_queue_t queue;
	struct worker *worker;
	bool owned, kicked, done;
	int error;
};

/* As many as nbdkit has threads by default. */
#define LANES 16
static struct lane lanes[LANES];
static pthread_mutex_t lanes_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t lanes_changed = PTHREAD_COND_INITIALIZER;

static void mngt_kick(ocf_queue_t queue)
{
	worker_kick(ocf_queue_get_priv(queue));
}

static void mngt_stop(ocf_queue_t queue)
{
	worker_end(ocf_queue_get_priv(queue));
}

static void lane_kick(ocf_queue_t queue)
{
	struct lane *lane = ocf_queue_get_priv(queue);

	pthread_mutex_lock(&lane->mutex);
	if (lane->owned) {
		lane->kicked = true;
		pthread_cond_signal(&lane->changed);
	} else {
		worker_kick(lane->worker);
	}
	pthread_mutex_unlock(&lane->mutex);
}

static void lane_stop(ocf_queue_t queue)
{
	worker_end(((struct lane *)ocf_queue_get_priv(queue))->worker);
}

static struct lane *lane_take(void)
{
	pthread_mutex_lock(&lanes_mutex);
	for (;;) {
		for (int i = 0; i < LANES; i++) {
			struct lane *lane = &lanes[i];

			if (lane->owned)
				continue;
			pthread_mutex_lock(&lane->mutex);
			lane->owned = true;
			lane->done = lane->kicked = false;
			pthread_mutex_unlock(&lane->mutex);
			pthread_mutex_unlock(&lanes_mutex);
			return lane;
		}
		pthread_cond_wait(&lanes_changed, &lanes_mutex);
	}
}

static void lane_put(struct lane *lane)
{
	pthread_mutex_lock(&lanes_mutex);
	pthread_mutex_lock(&lane->mutex);
	lane->owned = false;
	if (ocf_queue_pending_io(lane->queue))
		worker_kick(lane->worker);
	pthread_mutex_unlock(&lane->mutex);
	pthread_cond_signal(&lanes_changed);
	pthread_mutex_unlock(&lanes_mutex);
}

/* Runs the queue until the request is complete. Returns its error. */
static int lane_run(struct lane *lane)
{
	pthread_mutex_lock(&lane->mutex);
	while (!lane->done) {
		if (!lane->kicked) {
			pthread_cond_wait(&lane->changed, &lane->mutex);
			continue;
		}
		lane->kicked = false;
		pthread_mutex_unlock(&lane->mutex);
		ocf_queue_run(lane->queue);
		pthread_mutex_lock(&lane->mutex);
	}
	pthread_mutex_unlock(&lane->mutex);
	return lane->error;
}

static void lane_done(ocf_io_t io, void *opaque, void *unused, int error)
{
	struct lane *lane = opaque;

	pthread_mutex_lock(&lane->mutex);
	lane->error = error;
	lane->done = true;
	pthread_cond_signal(&lane->changed);
	pthread_mutex_unlock(&lane->mutex);
}

static const struct ocf_queue_ops mngt_queue_ops = { .kick = mngt_kick, .stop = mngt_stop };
static const struct ocf_queue_ops io_queue_ops = { .kick = lane_kick, .kick_sync = lane_kick, .stop = lane_stop };

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

static const struct ocf_ctx_config ctx_config = {
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

/* Waiting for completions. */

struct wait {
	sem_t done;
	int error;
	ocf_core_t core;
};

static void wait_begin(struct wait *wait)
{
	sem_init(&wait->done, 0, 0);
}

static int wait_end(struct wait *wait)
{
	while (sem_wait(&wait->done))
		;
	sem_destroy(&wait->done);
	return wait->error;
}

static void cache_done(ocf_cache_t unused, void *opaque, int error)
{
	struct wait *wait = opaque;

	wait->error = error;
	sem_post(&wait->done);
}

static void core_done(ocf_cache_t unused, ocf_core_t added, void *opaque, int error)
{
	struct wait *wait = opaque;

	wait->core = added;
	cache_done(unused, opaque, error);
}

/* Starting and stopping. */

static int lane_start(struct lane *lane)
{
	int error;

	*lane = (struct lane) { };
	pthread_mutex_init(&lane->mutex, NULL);
	pthread_cond_init(&lane->changed, NULL);
	error = ocf_queue_create(cache, &lane->queue, &io_queue_ops);
	if (error)
		return error;
	ocf_queue_set_priv(lane->queue, lane);
	lane->worker = worker_start(lane->queue, NULL);
	return lane->worker ? 0 : -OCF_ERR_NO_MEM;
}

static int queues_start(void)
{
	struct worker *worker;
	int error = ocf_queue_create_mngt(cache, &mngt_queue, &mngt_queue_ops);

	if (error)
		return error;
	worker = worker_start(mngt_queue, NULL);
	if (!worker)
		return -OCF_ERR_NO_MEM;
	ocf_queue_set_priv(mngt_queue, worker);
	for (int i = 0; !error && i < LANES; i++)
		error = lane_start(&lanes[i]);
	return error;
}

/* Starts a cache on a volume, and attaches or loads it. */
static int cache_start(char *volume_name)
{
	struct ocf_mngt_cache_config config = { .name = "cache" };
	struct ocf_mngt_cache_attach_config attach = { };
	struct ocf_volume_uuid uuid;
	ocf_volume_t volume;
	struct wait wait;
	int error;

	ocf_mngt_cache_config_set_default(&config);
	config.cache_mode = write_back ? ocf_cache_mode_wb : ocf_cache_mode_wt;
	config.metadata_volatile = lines != 0;
	error = ocf_mngt_cache_start(ctx, &cache, &config, NULL);
	if (error)
		return error;
	error = queues_start();
	if (error)
		return error;
	ocf_mngt_cache_attach_config_set_default(&attach);
	attach.force = !load;
	attach.discard_on_start = false;
	attach.device.perform_test = false;
	error = ocf_uuid_set_str(&uuid, volume_name);
	if (error)
		return error;
	error = ocf_volume_create(&volume, ocf_ctx_get_volume_type(ctx, VOLUME_TYPE), &uuid);
	if (error)
		return error;
	attach.device.volume = volume;
	wait_begin(&wait);
	if (load)
		ocf_mngt_cache_load(cache, &attach, cache_done, &wait);
	else
		ocf_mngt_cache_attach(cache, &attach, cache_done, &wait);
	error = wait_end(&wait);
	ocf_volume_destroy(volume);
	return error;
}

static void cache_stop(void)
{
	struct wait wait;

	cleaner_queue = NULL;
	wait_begin(&wait);
	ocf_mngt_cache_stop(cache, cache_done, &wait);
	if (wait_end(&wait))
		nbdkit_error("OCF could not stop the cache");
	ocf_queue_put(mngt_queue);
}

/* Starts a cache of just this number of lines, whose metadata need a length that is not known before. */
static int cache_start_lines(void)
{
	uint64_t size = lines * BLOCK + (16u << 20);
	struct ocf_cache_info info;
	char name[32];
	int error;

	for (int attempt = 0; attempt < 12; attempt++) {
		snprintf(name, sizeof(name), "null:%llu", (unsigned long long)size);
		error = cache_start(name);
		if (error)
			return error;
		error = ocf_cache_get_info(cache, &info);
		if (error || info.size == lines)
			return error;
		size += ((int64_t)lines - (int64_t)info.size) * BLOCK;
		cache_stop();
	}
	nbdkit_error("OCF cannot have %llu lines", (unsigned long long)lines);
	return -OCF_ERR_INVAL;
}

static int core_start(void)
{
	struct ocf_mngt_core_config config = { .name = CORE_NAME };
	struct wait wait;
	int error;

	if (load)
		return ocf_core_get_by_name(cache, CORE_NAME, strlen(CORE_NAME), &core);
	ocf_mngt_core_config_set_default(&config);
	config.volume_type = VOLUME_TYPE;
	config.seq_cutoff_threshold = cutoff;
	error = ocf_uuid_set_str(&config.uuid, (char *)core_path);
	if (error)
		return error;
	wait_begin(&wait);
	ocf_mngt_cache_add_core(cache, &config, core_done, &wait);
	error = wait_end(&wait);
	core = wait.core;
	return error;
}

static int configure(void)
{
	int error = 0;

	if (!cutoff)
		error = ocf_mngt_core_set_seq_cutoff_policy(core, ocf_seq_cutoff_policy_never);
	if (!error && clean_seconds) {
		const struct { uint32_t parameter, value; } values[] = {
			{ ocf_alru_wake_up_time, clean_seconds }, { ocf_alru_stale_buffer_time, clean_seconds },
			{ ocf_alru_activity_threshold, 0 },
		};
		for (unsigned i = 0; !error && i < sizeof(values) / sizeof(*values); i++)
			error = ocf_mngt_cache_cleaning_set_param(cache, ocf_cleaning_alru, values[i].parameter,
					values[i].value);
	}
	return error;
}

static int plugin_after_fork(void)
{
	int error = ocf_ctx_create(&ctx, &ctx_config);

	if (!error)
		error = ocf_ctx_register_volume_type(ctx, VOLUME_TYPE, &volume_properties);
	if (!error)
		error = lines ? cache_start_lines() : cache_start((char *)cache_path);
	if (!error)
		error = core_start();
	if (!error)
		error = configure();
	if (error) {
		nbdkit_error("OCF did not start: error %d", error);
		return -1;
	}
	cleaner_queue = lanes[0].queue;
	core_size = ocf_volume_get_length(ocf_core_get_front_volume(core));
	return 0;
}

static void statistics_write(void)
{
	struct ocf_stats_requests requests;
	struct ocf_stats_usage usage;
	struct ocf_cache_info info;
	FILE *file = fopen(statistics_path, "w");

	if (!file || ocf_stats_collect_core(core, &usage, &requests, NULL, NULL) || ocf_cache_get_info(cache, &info)) {
		nbdkit_error("cannot write %s", statistics_path);
		return;
	}
#define VALUE(name) (unsigned long long)requests.name.value
	fprintf(file, "{\"lines\": %u, \"dirty\": %u, \"reads\": %llu, \"read_hits\": %llu, \"read_partial\": %llu, "
			"\"read_misses\": %llu, \"read_passed\": %llu, \"writes\": %llu, \"write_hits\": %llu, "
			"\"write_passed\": %llu}\n", info.size, info.dirty,
			VALUE(rd_total), VALUE(rd_hits), VALUE(rd_partial_misses), VALUE(rd_full_misses), VALUE(rd_pt),
			VALUE(wr_total), VALUE(wr_hits), VALUE(wr_pt));
#undef VALUE
	fclose(file);
}

static void plugin_cleanup(void)
{
	if (!core)
		return;
	if (statistics_path)
		statistics_write();
	cache_stop();
	ocf_ctx_unregister_volume_type(ctx, VOLUME_TYPE);
	ocf_ctx_put(ctx);
}

static int plugin_config(const char *key, const char *value)
{
	if (!strcmp(key, "core"))
		core_path = value;
	else if (!strcmp(key, "cache"))
		cache_path = value;
	else if (!strcmp(key, "statistics"))
		statistics_path = value;
	else if (!strcmp(key, "lines"))
		lines = strtoull(value, NULL, 10);
	else if (!strcmp(key, "cutoff"))
		cutoff = strtoull(value, NULL, 10);
	else if (!strcmp(key, "clean"))
		clean_seconds = strtoul(value, NULL, 10);
	else if (!strcmp(key, "load"))
		load = !strcmp(value, "1");
	else if (!strcmp(key, "mode"))
		write_back = !strcmp(value, "wb");
	else {
		nbdkit_error("unknown parameter %s", key);
		return -1;
	}
	return 0;
}

static int plugin_config_complete(void)
{
	if (core_path && cache_path)
		return 0;
	nbdkit_error("the parameters core and cache are required");
	return -1;
}

static void *plugin_open(int readonly)
{
	return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t plugin_get_size(void *handle)
{
	return core_size;
}

static int plugin_block_size(void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
	*minimum = 512;
	*preferred = BLOCK;
	*maximum = 32u << 20;
	return 0;
}

/* One request to OCF. */
static int submit(char *bytes, uint32_t count, uint64_t offset, int direction, bool flush)
{
	struct data data = { .bytes = bytes };
	struct lane *lane = lane_take();
	ocf_io_t io = ocf_volume_new_io(ocf_core_get_front_volume(core), lane->queue, offset, count, direction, 0, 0);
	int error = io ? 0 : -OCF_ERR_NO_MEM;

	if (!error && !flush)
		error = ocf_io_set_data(io, &data, 0);
	if (!error) {
		ocf_io_set_cmpl(io, lane, NULL, lane_done);
		if (flush)
			ocf_core_submit_flush(io);
		else
			ocf_core_submit_io(io);
		error = lane_run(lane);
	}
	if (io)
		ocf_io_put(io);
	lane_put(lane);
	if (!error)
		return 0;
	nbdkit_error("OCF failed a request: error %d", error);
	errno = EIO;
	return -1;
}

static int transfer_pieces(char *bytes, uint32_t count, uint64_t offset, int direction)
{
	while (count) {
		uint32_t piece = count < REQUEST_MAX ? count : REQUEST_MAX;

		if (submit(bytes, piece, offset, direction, false))
			return -1;
		bytes += piece;
		offset += piece;
		count -= piece;
	}
	return 0;
}

static int plugin_pread(void *handle, void *bytes, uint32_t count, uint64_t offset, uint32_t flags)
{
	return transfer_pieces(bytes, count, offset, OCF_READ);
}

static int plugin_pwrite(void *handle, const void *bytes, uint32_t count, uint64_t offset, uint32_t flags)
{
	return transfer_pieces((char *)bytes, count, offset, OCF_WRITE);
}

static int plugin_flush(void *handle, uint32_t flags)
{
	return submit(NULL, 0, 0, OCF_WRITE, true);
}

static int plugin_can_multi_conn(void *handle)
{
	return 1;
}

static struct nbdkit_plugin plugin = {
	.name = "ocf",
	.config = plugin_config,
	.config_complete = plugin_config_complete,
	.after_fork = plugin_after_fork,
	.cleanup = plugin_cleanup,
	.open = plugin_open,
	.get_size = plugin_get_size,
	.block_size = plugin_block_size,
	.can_multi_conn = plugin_can_multi_conn,
	.pread = plugin_pread,
	.pwrite = plugin_pwrite,
	.flush = plugin_flush,
};

NBDKIT_REGISTER_PLUGIN(plugin)
