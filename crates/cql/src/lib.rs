//! CQL, the language of standing queries over streams and relations.
//!
//! Read [`plan::Plan`] first. The crate must not know engines, and where events come from.
//!
//! A text is parsed into a [`Script`](ast::Script), and a script is planned as
//! [`Plan`](plan::Plan)s. A plan defines the contents of its relation at each instant. The
//! [`oracle`] evaluates plans naively. The fast engine is in another crate; tests compare it with
//! the oracle, on cases that [`generate`] makes.
//!
//! If many hosts have events, [`split`](split()) divides a plan into the part of each host and the
//! part of the centre.
//!
//! The language is that of A. Arasu, S. Babu and J. Widom, "The CQL continuous query language:
//! semantic foundations and query execution" (VLDB Journal 15(2), 2006), with the choices of the
//! STREAM system where the paper leaves a choice.

#![forbid(unsafe_code)]

pub mod aggregate;
pub mod ast;
pub mod catalog;
pub mod check;
pub mod eval;
mod explain;
mod foreign;
pub mod generate;
mod lexer;
mod likeness;
pub mod oracle;
mod parser;
pub mod plan;
mod planner;
mod prune;
mod render;
mod sources;
mod span;
mod split;
mod value;

pub use explain::explain;
pub use parser::{ParseOptions, parse};
pub use planner::walk;
pub use planner::{Parameters, Planned, PlannedQuery, plan_script};
pub use prune::prune;
pub use sources::{map_sources, place_sources, sources};
pub use span::{Diagnostic, Span};
pub use split::{Hosts, Split, split};
pub use value::{Row, Type, Value};
