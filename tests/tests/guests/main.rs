//! The tests with real guests, in one program: one to build, and the tests of all files share the
//! number of guests that run at a time.

mod crash;
mod filesystems;
mod harness;
mod introspection;
mod introspection_follows;
mod introspection_layers;
mod introspection_systems;
mod memory_hotplug;
mod migration;
mod not_shared;
mod reboot;
mod reconnect;
mod resize;
mod scene;
mod truth;
mod two_guests;
