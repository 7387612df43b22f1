/* What OCF asks of its environment, for the plugin. */

#ifndef CONTEXT_H
#define CONTEXT_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <ocf/ocf.h>
/* Of the environment: nbdkit has a macro of this name, too. */
#undef container_of

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

/* The longest request to OCF, in bytes. Longer ones of a client are divided. */
#define REQUEST_MAX (128u << 10)
#define BLOCK 4096u

/* A piece of memory with a position. */
struct data {
	char *bytes;
	uint32_t position;
	bool owned;
};

/* A thread that runs a queue or the cleaner when it is kicked. */
struct worker {
	pthread_t thread;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	bool kicked, ended;
	ocf_queue_t queue;     /* NULL for the cleaner */
	ocf_cleaner_t cleaner;
	uint32_t interval_ms;  /* until the cleaner's next run; 0 for when it is kicked */
};

struct worker *worker_start(ocf_queue_t queue, ocf_cleaner_t cleaner);
void worker_kick(struct worker *worker);
void worker_end(struct worker *worker);

/* The queue of what the cleaner submits. The cleaner does not run before it is set. */
extern ocf_queue_t cleaner_queue;

extern const struct ocf_volume_properties volume_properties;
extern const struct ocf_ctx_config ctx_config;

#endif
