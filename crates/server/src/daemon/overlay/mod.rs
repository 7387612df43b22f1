//! Live changes of disks, which outlive the daemon.
//!
//! The configuration file describes the disks of a host, and requests change them while they are in
//! use. What a request changes is kept in a folder beside the file, so that the next daemon serves
//! the disks as they were. `docs/state.md` describes the folder and its format.
//!
//! - `record`: the records, and their format.
//! - `folder`: the folder: its lock, and durable writes.
//! - `lineage`: whether it is the folder that the configuration had before.
//! - `decide`: which definition of a disk applies at a start.
//!
//! A record says what a disk is, not what was done to it. It has the entry of the file as it was
//! when the disk was changed. As long as the file has the same entry, the record applies. Once the
//! entry has been edited, the file applies, and the record is set aside.
//!
//! A change has three steps, so that a kill between any two of them leaves a state which the next
//! start can explain:
//! 1. The record is durable as *pending*, with the definitions before and after the change.
//! 2. The disk is changed. If that moves its changes to a log or out of one, the mark of the image
//!    says how far this has come.
//! 3. The record is durable as *done*. Only then is the request answered.
//!
//! A change that failed puts the earlier record back.

mod decide;
mod folder;
mod lineage;
mod record;

pub(crate) use decide::{DefinitionChoice, choose, is_as_in_file, is_unchanged};
pub(crate) use folder::{Folder, FoundRecords};
pub(crate) use lineage::Strange;
pub(crate) use record::{ChangeRecord, Damage, RecordKind, RecordProgress, as_recorded, stem};
