//! Who causes the I/O, as JSON.

use fathom_control::GuestInfo;
use serde::Serialize;

use crate::usage::{Accounts, Grouping, Groups, Line, Numbers, Scope, UsageOrder};

/// An object for an interval.
#[derive(Serialize)]
struct Sample<'a> {
    /// The end of the interval, in nanoseconds since 1970.
    unix_time_ns: u64,
    /// Its length, in seconds; 0 for all time.
    seconds: f64,
    by: Grouping,
    /// All requests of the interval.
    total: Numbers,
    usage: Vec<Line<'a>>,
    guests: &'a [GuestInfo],
}

/// What is wanted of the accounts.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'w> {
    /// The grouping.
    pub by: Grouping,
    /// The control group, if only one is wanted.
    pub container: Option<&'w str>,
    /// The order of the lines.
    pub order: UsageOrder,
    /// A text that the lines have to contain.
    pub filter: &'w str,
    /// The most lines.
    pub limit: usize,
}

/// The accounts as an object. Of `guests`, it has those of the disks in the accounts.
pub fn text(accounts: &Accounts, wanted: &Wanted<'_>, guests: &[GuestInfo]) -> String {
    let container = wanted.container.map(str::to_owned);
    let scope = Scope { container, ..Scope::default() };
    let mut groups = Groups::of(accounts, wanted.by, &scope);
    groups.filter(wanted.filter);
    groups.sort(wanted.order);
    let guests = shown(accounts, guests);
    let seconds = accounts.seconds;
    let sample = Sample {
        unix_time_ns: accounts.unix_time_ns,
        seconds,
        by: wanted.by,
        total: Numbers::of(&groups.total.sum(), seconds),
        usage: groups.entries.iter().take(wanted.limit).map(|entry| entry.line(seconds)).collect(),
        guests: &guests,
    };
    // Its keys are texts, so that it is JSON in any case.
    serde_json::to_string(&sample).unwrap_or_default()
}

/// The guests of the disks in the accounts.
pub fn shown(accounts: &Accounts, guests: &[GuestInfo]) -> Vec<GuestInfo> {
    let is_shown =
        |guest: &&GuestInfo| guest.disks.iter().any(|name| accounts.disk(name).is_some());
    guests.iter().filter(is_shown).cloned().collect()
}
