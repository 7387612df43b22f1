/*
 * A plugin of nbdkit that serves a disk through OCF, the cache library of Open CAS, for bench/cache.
 *
 *   nbdkit ./nbdkit-ocf-plugin.so core=FILE cache=FILE [mode=wt|wb] [load=1] [cutoff=BYTES] [clean=SECONDS]
 *   nbdkit ./nbdkit-ocf-plugin.so core=null:BYTES cache=null: lines=NUMBER …
 *
 * The core (the slow disk) and the cache device are files, read and written through the page cache like those
 * of nbdkit's file plugin; a flush is fdatasync. A volume "null:BYTES" has no data and is for hit ratios: the
 * cache's is made just as long as `lines` cache lines need. With `cutoff`, longer sequential streams pass the
 * cache by; with `clean`, what has been dirty for this time is written home soon. Requests run in nbdkit's threads,
 * and the cleaner has a thread. With statistics=FILE, OCF's counts of requests are written there as JSON at the
 * orderly end.
 */

#include <errno.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include <ocf/cleaning/alru.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#define VOLUME_TYPE 1
#define CORE_NAME "core"

/* The parameters. */
static const char *core_path, *cache_path, *statistics_path;
static uint64_t lines, cutoff;
static uint32_t clean_seconds;
static bool load, write_back;

static ocf_ctx_t ctx;
static ocf_cache_t cache;
static ocf_core_t core;
static ocf_queue_t mngt_queue;
static uint64_t core_size;

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
