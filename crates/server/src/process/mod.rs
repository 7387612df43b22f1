//! The life of the process: its start, its signals, its log and its end.

pub(crate) mod command;
pub(crate) mod group;
pub(crate) mod log;
pub(crate) mod notify;
pub(crate) mod run;
