//! The state of the usage page, and the effects of keys.
use std::collections::VecDeque;

use fathom_control::{GuestInfo, UsageReport};

use super::model::SortKey;
use crate::usage::{Accounts, Grouping, Groups, Scope, UsageEntry, requests};

/// The number of intervals remembered of an opened line.
const HISTORY: usize = 240;

/// A state of the page to which Esc returns.
struct Step {
    grouping: Grouping,
    scope: Scope,
    selected: Option<Scope>,
    filter: String,
}

/// The state of the usage page.
pub struct UsageView {
    /// The grouping of the lines.
    pub grouping: Grouping,
    /// The scope of the lines.
    pub scope: Scope,
    /// The key of the selected line.
    selected: Option<Scope>,
    /// The position of the selected line, which stays if the line disappears.
    place: usize,
    /// The lines of the last interval.
    pub groups: Option<Groups>,
    /// The line whose details are shown.
    pub opened: Option<UsageEntry>,
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

    /// Forgets the last sample, because the page is hidden. The next interval starts at the next
    /// sample.
    pub fn reset(&mut self) {
        self.before = None;
        self.accounts = None;
        self.groups = None;
    }

    /// Takes the next sample; shows it if `shown` is set.
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
            // The details of an idle line stay open.
            let found = groups.entries.iter().find(|entry| entry.key == opened.key);
            match found {
                Some(entry) => *opened = entry.clone(),
                None => opened.counts = fathom_control::UsageCounts::default(),
            }
        }
        groups.filter(filter);
        groups.sort(sort.of_accounts());
        let is_selected = |entry: &UsageEntry| Some(&entry.key) == self.selected.as_ref();
        let last = groups.entries.len().saturating_sub(1);
        // The selection follows its line; if the line disappears, it keeps its position.
        self.place = groups.entries.iter().position(is_selected).unwrap_or(self.place.min(last));
        if self.selected.is_none() {
            self.place = 0;
        }
        self.groups = Some(groups);
    }

    /// Remembers the requests of the opened line in the last interval.
    pub fn remember(&mut self) {
        let (Some(opened), Some(groups)) = (&self.opened, &self.groups) else { return };
        self.history.push_back(requests(&opened.counts) as f64 / groups.seconds);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// The requests per second of the opened line, since it was opened.
    pub fn history(&self) -> impl DoubleEndedIterator<Item = f64> + Clone + '_ {
        self.history.iter().copied()
    }

    /// The properties that are the same for all lines: the scope, and the machine if there is only
    /// one.
    pub fn common(&self) -> Scope {
        let common = self.accounts.as_ref().map(Accounts::common).unwrap_or_default();
        common.and(&self.scope)
    }

    /// The selected line.
    pub fn entry(&self) -> Option<&UsageEntry> {
        self.groups.as_ref()?.entries.get(self.place)
    }

    /// The position of the selected line.
    pub fn place(&self) -> usize {
        self.place
    }

    /// Moves the selection by a number of lines.
    pub fn select(&mut self, by: isize) {
        let Some(groups) = &self.groups else { return };
        let last = groups.entries.len().saturating_sub(1) as isize;
        self.place = (self.place as isize + by).clamp(0, last) as usize;
        self.selected = self.entry().map(|entry| entry.key.clone());
        if let Some(opened) = self.opened.is_some().then(|| self.entry().cloned()).flatten() {
            self.open(opened);
        }
    }

    fn open(&mut self, entry: UsageEntry) {
        self.history.clear();
        self.opened = Some(entry);
        self.remember();
    }

    /// Changes the grouping. Properties of the scope that contradict it are removed.
    pub fn group_by(&mut self, grouping: Grouping) {
        self.opened = None;
        match grouping {
            Grouping::Vm => self.scope.machine = None,
            Grouping::Container => self.scope.container = None,
            Grouping::Process => self.scope.process = None,
            Grouping::File => {}
            Grouping::Kind => self.scope.kind = None,
            Grouping::Database => self.scope.database = None,
        }
        if grouping < Grouping::Process {
            self.scope.process = None;
        }
        if grouping < Grouping::Container {
            self.scope.container = None;
        }
        // Esc returns only to scopes that are wider than this one.
        let scope = &self.scope;
        self.steps.retain(|step| step.scope != *scope && step.scope.and(scope) == *scope);
        self.grouping = grouping;
        self.selected = None;
    }

    /// Shows the accounts of one disk.
    pub fn show_disk(&mut self, disk: &str) {
        let guests = std::mem::take(&mut self.guests);
        *self = Self { guests, scope: Scope::of_disk(disk), ..Self::default() };
    }

    /// Opens the selected line: narrows the scope to it, or shows the details of a file. The filter
    /// is cleared, and restored when Esc returns.
    pub fn enter(&mut self, filter: &mut String) {
        let (Some(entry), Some(accounts)) = (self.entry().cloned(), &self.accounts) else { return };
        if matches!(self.grouping, Grouping::File | Grouping::Database) {
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

    /// Shows the details of the selected line.
    pub fn open_selected(&mut self) {
        if let Some(entry) = self.entry().cloned() {
            self.open(entry);
        }
    }

    /// Goes back one step. Returns whether there was one.
    pub fn go_back(&mut self, filter: &mut String) -> bool {
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
        // The selection also moves while details are shown.
        view.select(-1);
        assert_eq!(view.opened.as_ref().map(|entry| entry.name.as_str()), Some("/srv/b"));
        let filter = &mut String::new();
        assert!(view.go_back(filter) && view.opened.is_none());
        assert!(view.go_back(filter));
        view.arrange(SortKey::Iops, "");
        assert_eq!(view.entry().map(|entry| entry.name.as_str()), Some("/web"));
        assert!(view.go_back(filter) && !view.go_back(filter));
        assert_eq!(view.grouping, Grouping::Vm);
    }

    #[test]
    fn a_known_process_is_a_step_and_filters_are_restored() {
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
        // With another grouping the scope keeps the container and loses its process.
        view.group_by(Grouping::Kind);
        view.arrange(SortKey::Iops, "");
        assert_eq!(
            (names(&view), view.scope.text().as_str()),
            (vec!["data"], "shop › /database › fio 12")
        );
        view.group_by(Grouping::Container);
        view.arrange(SortKey::Iops, "");
        assert_eq!((view.grouping, view.scope.text().as_str()), (Grouping::Container, "shop"));
        assert!(view.go_back(&mut filter) && !view.go_back(&mut filter));
        assert_eq!((view.grouping, view.scope.text().as_str()), (Grouping::Vm, ""));
        // When Esc returns, the filter is restored.
        view.arrange(SortKey::Iops, "");
        enter(&mut view);
        filter = "web".into();
        view.arrange(SortKey::Iops, &filter);
        view.enter(&mut filter);
        view.arrange(SortKey::Iops, &filter);
        assert_eq!(names(&view), ["/srv/b", "/srv/a"]);
        assert!(view.go_back(&mut filter) && filter == "web");
        assert!(view.go_back(&mut filter) && filter.is_empty());
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
