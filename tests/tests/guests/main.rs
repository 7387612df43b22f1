//! The tests with real guests. They are one program, so that there is only one to build, and the
//! tests of all files share the limit on guests that run at the same time.

mod cache;
mod crash;
mod databases;
mod dirty;
mod filesystems;
mod flush;
mod freeze;
mod harness;
mod hints;
mod hooks;
mod introspection;
mod introspection_follows;
mod introspection_layers;
mod introspection_systems;
mod lifetimes;
mod limit;
mod memory_hotplug;
mod migration;
mod not_shared;
mod offload;
mod patterns;
mod pin;
mod processes;
mod pull;
mod reboot;
mod reconnect;
mod resize;
mod scene;
mod schedule;
mod store;
mod store_hints;
mod syscalls;
mod truth;
mod two_guests;
mod writers;
