//! The daemon as a process: started, queried, changed, loaded and ended as operators do it.

mod bounds;
mod cache;
mod caches;
mod changes;
mod devices;
mod events;
mod giants;
mod kept_caches;
mod limit;
mod lost_writes;
mod monitor;
mod nbd;
mod neighbours;
mod parquet;
mod problems;
mod process;
mod queries;
mod query;
mod reload;
mod schedule;
mod stop;
mod stuck;
mod usage;
mod wal;
mod write_back;
