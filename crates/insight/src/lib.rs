//! One vocabulary for what disk requests mean.
//!
//! An [`Insight`] rides on a request: which kind of data it moves, for which file, control group
//! and process of the guest. It says where it was learnt ([`Source`]) and how sure that is
//! ([`Confidence`]). Texts (paths, groups, commands) travel as numbers of a bounded table,
//! [`Names`].
//!
//! What the tap tells of a request is an [`event`]; the columns that queries see are made of it.
//!
//! **An insight is a hint.** A guest can lie about itself, and its memory changes while it is
//! read: a wrong insight may cost time, never data.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod class;
pub mod event;
mod kind;
mod names;
mod part;

pub use class::{ClassError, ClassTable, IoClass};
pub use kind::{Confidence, Kind, Source};
pub use names::{Name, Names};
pub use part::{Facts, Insight, Part, RequestFlags};
