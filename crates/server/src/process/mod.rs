//! The life of the process: its start, its signals, its journal and its end.

pub(crate) mod command;
pub(crate) mod confine;
pub(crate) mod group;
pub(crate) mod journal;
pub(crate) mod line;
pub(crate) mod notify;
pub(crate) mod packets;
pub(crate) mod qmp;
pub(crate) mod run;
mod text;
