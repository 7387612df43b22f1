//! Who causes the I/O: what is looked at, and what keys do to it.
use std::collections::VecDeque;

use fathom_control::{GuestInfo, UsageReport};

use super::model::SortKey;
use crate::usage::{Accounts, Entry, Grouping, Groups, Scope, requests};

/// How many intervals of an opened line are remembered.
const HISTORY: usize = 240;

/// A place that Esc leads back to.
struct Step {
    grouping: Grouping,
    scope: Scope,
    selected: Option<Scope>,
    filter: String,
}

/// Who causes the I/O, as it is looked at.
pub struct UsageView {
    /// What the lines are put together by.
    pub grouping: Grouping,
    /// What is looked at.
    pub scope: Scope,
    /// What the selected line is of.
    selected: Option<Scope>,
    /// Where the selected line is, or was.
    place: usize,
    /// The lines of the last interval.
    pub groups: Option<Groups>,
    /// The line that is shown in full.
    pub opened: Option<Entry>,
    /// The daemon's guests.
    pub guests: Vec<GuestInfo>,
    steps: Vec<Step>,
    before: Option<UsageReport>,
    accounts: Option<Accounts>,
    history: VecDeque<f64>,
}

impl Default for UsageView {
    fn default() -> Self {
        Self {
            grouping: Grouping::Container,
            scope: Scope::default(),
            selected: None,
            place: 0,
            groups: None,
            opened: None,
            guests: Vec::new(),
            steps: Vec::new(),
            before: None,
            accounts: None,
            history: VecDeque::new(),
        }
    }
}

impl UsageView {
    /// Whether there is a sample to compare the next one with.
    pub fn has_begun(&self) -> bool {
        self.before.is_some()
    }

    /// Forgets the last sample: nobody looks, and the next interval is to begin anew.
    pub fn rest(&mut self) {
        self.before = None;
        self.accounts = None;
        self.groups = None;
    }

    /// Takes the next sample; shows it unless the screen stands still.
    pub fn sample(&mut self, after: UsageReport, shown: bool) {
        if let Some(before) = self.before.as_ref().filter(|_| shown) {
            self.accounts = Some(Accounts::between(before, &after));
        }
        self.before = Some(after);
    }

    /// Applies grouping, scope, filter and order to the last interval.
    pub fn arrange(&mut self, sort: SortKey, filter: &str) {
        let Some(accounts) = &self.accounts else { return };
        let mut groups = Groups::of(accounts, self.grouping, &self.scope);
        if let Some(opened) = &mut self.opened {
            // An idle line stays open.
            let found = groups.entries.iter().find(|entry| entry.key == opened.key);
            match found {
                Some(entry) => *opened = entry.clone(),
                None => opened.counts = fathom_control::UsageCounts::default(),
            }
        }
        groups.filter(filter);
        groups.sort(sort.of_accounts());
        let is_selected = |entry: &Entry| Some(&entry.key) == self.selected.as_ref();
        let last = groups.entries.len().saturating_sub(1);
        // The selection stays with what was selected; where that is gone, with its place.
        self.place = groups.entries.iter().position(is_selected).unwrap_or(self.place.min(last));
        if self.selected.is_none() {
            self.place = 0;
        }
        self.groups = Some(groups);
    }

    /// Remembers the interval's requests of the line that is shown in full.
    pub fn remember(&mut self) {
        let (Some(opened), Some(groups)) = (&self.opened, &self.groups) else { return };
        self.history.push_back(requests(&opened.counts) as f64 / groups.seconds);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// The requests a second of the line that is shown in full, since it was opened.
    pub fn history(&self) -> impl DoubleEndedIterator<Item = f64> + Clone + '_ {
        self.history.iter().copied()
    }

    /// What is the same for all lines: what is looked at, and the machine where there is one.
    pub fn common(&self) -> Scope {
        let common = self.accounts.as_ref().map(Accounts::common).unwrap_or_default();
        common.and(&self.scope)
    }

    /// The selected line.
    pub fn entry(&self) -> Option<&Entry> {
        self.groups.as_ref()?.entries.get(self.place)
    }

    /// The selected line's place.
    pub fn place(&self) -> usize {
        self.place
    }

    /// Moves the selection by so many lines.
    pub fn select(&mut self, by: isize) {
        let Some(groups) = &self.groups else { return };
        let last = groups.entries.len().saturating_sub(1) as isize;
        self.place = (self.place as isize + by).clamp(0, last) as usize;
        self.selected = self.entry().map(|entry| entry.key.clone());
        if let Some(opened) = self.opened.is_some().then(|| self.entry().cloned()).flatten() {
            self.open(opened);
        }
    }

    fn open(&mut self, entry: Entry) {
        self.history.clear();
        self.opened = Some(entry);
        self.remember();
    }

    /// Puts the lines together by something else. What the scope says of that is given up.
    pub fn group_by(&mut self, grouping: Grouping) {
        self.opened = None;
        match grouping {
            Grouping::Vm => self.scope.machine = None,
            Grouping::Container => self.scope.container = None,
            Grouping::Process => self.scope.process = None,
            Grouping::File => {}
            Grouping::Kind => self.scope.kind = None,
        }
        if grouping < Grouping::Process {
            self.scope.process = None;
        }
        if grouping < Grouping::Container {
            self.scope.container = None;
        }
        // Esc leads to what is wider than this.
        let scope = &self.scope;
        self.steps.retain(|step| step.scope != *scope && step.scope.and(scope) == *scope);
        self.grouping = grouping;
        self.selected = None;
    }

    /// Looks at one disk's accounts.
    pub fn look_at(&mut self, disk: &str) {
        let guests = std::mem::take(&mut self.guests);
        *self = Self { guests, scope: Scope::of_disk(disk), ..Self::default() };
    }

    /// From the selected line to what it consists of; a file's line is shown in full. The filter
    /// has done its work and is given back when Esc leads back.
    pub fn enter(&mut self, filter: &mut String) {
        let (Some(entry), Some(accounts)) = (self.entry().cloned(), &self.accounts) else { return };
        if self.grouping == Grouping::File {
            self.open(entry);
            return;
        }
        let scope = self.scope.and(&entry.key);
        let grouping = Groups::below(accounts, self.grouping, &scope);
        self.steps.push(Step {
            grouping: self.grouping,
            scope: std::mem::replace(&mut self.scope, scope),
            selected: Some(entry.key),
            filter: std::mem::take(filter),
        });
        self.grouping = grouping;
        self.selected = None;
    }

    /// Shows the selected line in full.
    pub fn open_selected(&mut self) {
        if let Some(entry) = self.entry().cloned() {
            self.open(entry);
        }
    }

    /// One step back. Returns whether there was one.
    pub fn leave(&mut self, filter: &mut String) -> bool {
        if self.opened.take().is_some() {
            return true;
        }
        if !filter.is_empty() {
            filter.clear();
            return true;
        }
        if let Some(step) = self.steps.pop() {
            (self.grouping, self.scope) = (step.grouping, step.scope);
            (self.selected, *filter) = (step.selected, step.filter);
            return true;
        }
        let is_narrow = self.scope != Scope::default();
        if is_narrow {
            self.scope = Scope::default();
            self.selected = None;
        }
        is_narrow
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::usage::tests::{row, usage};

    /// Two samples of two containers, a second apart.
    pub fn samples() -> (UsageReport, UsageReport) {
        let mut after = usage();
        after.time_ns = 1_000_000_000;
        after.unix_time_ns = 1_000_000_000;
        let mut before = after.clone();
        before.time_ns = 0;
        before.disks[0].rows = vec![row("/old", "/srv/old", 3)];
        after.disks[0].rows.push(row("/old", "/srv/old", 3));
        before.disks[0].unknown = fathom_control::UsageCounts::default();
        before.disks[0].total = row("", "", 3).counts;
        (before, after)
    }

    fn view() -> UsageView {
        let mut view = UsageView { grouping: Grouping::Vm, ..UsageView::default() };
        let (before, after) = samples();
        view.sample(before, true);
        view.sample(after, true);
        view.arrange(SortKey::Iops, "");
        view
    }

    fn names(view: &UsageView) -> Vec<&str> {
        let groups = view.groups.as_ref().expect("there are lines");
        groups.entries.iter().map(|entry| entry.name.as_str()).collect()
    }

    fn enter(view: &mut UsageView) {
        view.enter(&mut String::new());
        view.arrange(SortKey::Iops, "");
    }

    #[test]
    fn enter_leads_to_files_and_back() {
        let mut view = view();
        assert_eq!(names(&view), ["shop"]);
        enter(&mut view);
        assert_eq!(names(&view), ["/database", "/web", "/", "(unknown)", "/old"]);
        view.select(1);
        enter(&mut view);
        assert_eq!((view.grouping, view.scope.text().as_str()), (Grouping::File, "shop › /web"));
        assert_eq!(names(&view), ["/srv/b", "/srv/a"]);
        view.select(1);
        enter(&mut view);
        assert_eq!(view.opened.as_ref().map(|entry| entry.name.as_str()), Some("/srv/a"));
        assert_eq!(view.history().collect::<Vec<_>>(), [10.0]);
        // Another file is a key away, also from there.
        view.select(-1);
        assert_eq!(view.opened.as_ref().map(|entry| entry.name.as_str()), Some("/srv/b"));
        let filter = &mut String::new();
        assert!(view.leave(filter) && view.opened.is_none());
        assert!(view.leave(filter));
        view.arrange(SortKey::Iops, "");
        assert_eq!(view.entry().map(|entry| entry.name.as_str()), Some("/web"));
        assert!(view.leave(filter) && !view.leave(filter));
        assert_eq!(view.grouping, Grouping::Vm);
    }

    #[test]
    fn a_known_process_is_a_step_of_its_own_and_filters_come_back() {
        let mut view = view();
        enter(&mut view);
        let mut filter = "data".to_owned();
        view.arrange(SortKey::Iops, &filter);
        assert_eq!(names(&view), ["/database", "/web", "/"]);
        view.enter(&mut filter);
        view.arrange(SortKey::Iops, &filter);
        assert_eq!((view.grouping, filter.as_str()), (Grouping::Process, ""));
        assert_eq!(names(&view), ["fio 12"]);
        enter(&mut view);
        assert_eq!(names(&view), ["/srv/table.dat"]);
        // Grouped otherwise, the container stays and its process goes.
        view.group_by(Grouping::Kind);
        view.arrange(SortKey::Iops, "");
        assert_eq!(
            (names(&view), view.scope.text().as_str()),
            (vec!["data"], "shop › /database › fio 12")
        );
        view.group_by(Grouping::Container);
        view.arrange(SortKey::Iops, "");
        assert_eq!((view.grouping, view.scope.text().as_str()), (Grouping::Container, "shop"));
        assert!(view.leave(&mut filter) && !view.leave(&mut filter));
        assert_eq!((view.grouping, view.scope.text().as_str()), (Grouping::Vm, ""));
        // Where Esc leads straight back, the filter is there again.
        view.arrange(SortKey::Iops, "");
        enter(&mut view);
        filter = "web".into();
        view.arrange(SortKey::Iops, &filter);
        view.enter(&mut filter);
        view.arrange(SortKey::Iops, &filter);
        assert_eq!(names(&view), ["/srv/b", "/srv/a"]);
        assert!(view.leave(&mut filter) && filter == "web");
        assert!(view.leave(&mut filter) && filter.is_empty());
    }

    #[test]
    fn the_selection_follows_its_line_and_keeps_its_place() {
        let mut view = view();
        view.group_by(Grouping::File);
        view.arrange(SortKey::Iops, "");
        view.select(1);
        assert_eq!(view.entry().map(|entry| entry.name.as_str()), Some("/srv/b"));
        view.arrange(SortKey::Name, "");
        assert_eq!(view.entry().map(|entry| entry.name.as_str()), Some("/srv/b"));
        let place = view.place();
        view.arrange(SortKey::Name, "table");
        assert_eq!((view.place(), names(&view)), (0, vec!["/srv/table.dat"]));
        view.arrange(SortKey::Name, "");
        assert_eq!(view.place(), place);
        view.select(isize::MAX / 2);
        view.select(isize::MIN / 2);
        assert_eq!(view.place(), 0);
    }
}
