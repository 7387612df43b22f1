//! CQL, the language of standing queries over streams and relations.
//!
//! A text becomes a [`Script`](ast::Script), a script becomes [`Plan`](plan::Plan)s, and a plan
//! says for each instant what its relation holds. The [`oracle`] does exactly that, naively; the
//! engine that is fast lives elsewhere and is compared with it, on cases that [`generate`] makes.
//!
//! Where the events are those of many hosts, [`split`](split()) says what of a plan each computes.
//!
//! The language is that of A. Arasu, S. Babu and J. Widom, "The CQL continuous query language:
//! semantic foundations and query execution" (VLDB Journal 15(2), 2006), with the choices of the
//! STREAM system where the paper leaves one.

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
mod span;
mod split;
mod value;

pub use explain::explain;
pub use parser::{ParseOptions, parse};
pub use planner::walk;
pub use planner::{Parameters, Planned, PlannedQuery, plan_script};
pub use prune::prune;
pub use span::{Diagnostic, Span};
pub use split::{Hosts, Split, split};
pub use value::{Row, Type, Value};
