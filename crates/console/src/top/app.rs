//! The live view's state, and what keys do to it.
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use fathom_control::{GuestList, Statistics, UsageReport};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    model::{Disk, Interval, SortKey},
    seconds,
};
use crate::usage::{Entry, Grouping, Groups, Scope};

/// How many intervals are remembered.
const HISTORY: usize = 240;
/// The intervals that + and - step through.
const INTERVALS_MS: [u64; 8] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000];

/// What is on the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Page {
    /// All disks.
    Disks,
    /// One disk by operation.
    Disk(String),
    /// Who causes the I/O.
    Usage,
}

/// Who causes the I/O, as it is looked at.
#[derive(Default)]
pub struct Usage {
    /// What the lines are put together by.
    pub grouping: Option<Grouping>,
    /// What is looked at.
    pub scope: Scope,
    /// The selected line.
    pub selected: usize,
    /// The lines of the last interval.
    pub groups: Option<Groups>,
    /// How far the guests have been understood.
    pub guests: GuestList,
    before: Option<UsageReport>,
    interval: Option<(UsageReport, f64)>,
}

impl Usage {
    /// What the lines are put together by.
    pub fn grouping(&self) -> Grouping {
        self.grouping.unwrap_or(Grouping::Container)
    }

    /// Whether there is a sample to compare the next one with.
    pub fn has_begun(&self) -> bool {
        self.before.is_some()
    }

    /// The selected line.
    pub fn entry(&self) -> Option<&Entry> {
        self.groups.as_ref()?.entries.get(self.selected)
    }
}

/// The state.
pub struct App {
    /// Where the daemon is, for the title.
    pub socket: String,
    /// Time between samples.
    pub interval: Duration,
    /// Order of the disks.
    pub sort: SortKey,
    /// What names have to contain.
    pub filter: String,
    /// Whether the filter is being typed.
    pub typing: bool,
    /// Whether the screen stands still.
    pub paused: bool,
    /// Whether the keys are shown.
    pub help: bool,
    /// What is on the screen.
    pub page: Page,
    /// The selected disk.
    pub selected: Option<String>,
    /// Who causes the I/O.
    pub usage: Usage,
    /// The last interval, as it is shown.
    pub shown: Option<Interval>,
    /// Why there is no newer one.
    pub trouble: Option<String>,
    /// The user has seen enough.
    pub done: bool,
    unfiltered: Option<Interval>,
    before: Statistics,
    history: HashMap<String, VecDeque<f64>>,
}

impl App {
    /// Begins with a first sample.
    pub fn new(first: Statistics, interval: Duration, sort: SortKey, filter: String) -> Self {
        Self {
            socket: String::new(),
            interval,
            sort,
            filter,
            typing: false,
            paused: false,
            help: false,
            page: Page::Disks,
            selected: None,
            usage: Usage::default(),
            shown: None,
            trouble: None,
            done: false,
            unfiltered: None,
            before: first,
            history: HashMap::new(),
        }
    }

    /// Takes the next sample.
    pub fn sample(&mut self, after: Statistics) {
        let interval = Interval::between(&self.before, &after);
        self.before = after;
        self.trouble = None;
        self.history.retain(|name, _| interval.disks.iter().any(|disk| disk.name == *name));
        for disk in &interval.disks {
            let history = self.history.entry(disk.name.clone()).or_default();
            history.push_back(disk.activity.iops());
            if history.len() > HISTORY {
                history.pop_front();
            }
        }
        if !self.paused {
            self.unfiltered = Some(interval);
            self.arrange();
        }
    }

    /// Begins with who causes the I/O.
    pub fn show_usage(&mut self, grouping: Grouping) {
        self.page = Page::Usage;
        self.usage.grouping = Some(grouping);
    }

    /// Takes the next sample of who causes the I/O.
    pub fn sample_usage(&mut self, after: UsageReport, guests: GuestList) {
        if !self.paused {
            if let Some(before) = &self.usage.before {
                let seconds = seconds(before, &after);
                self.usage.interval = Some((after.since(before), seconds));
            }
            self.usage.guests = guests;
        }
        self.usage.before = Some(after);
        self.arrange_usage();
    }

    /// Applies grouping, scope, filter and order.
    fn arrange_usage(&mut self) {
        let grouping = self.usage.grouping();
        let usage = &mut self.usage;
        let Some((interval, seconds)) = &usage.interval else { return };
        let chosen = usage.entry().map(|entry| (entry.name.clone(), entry.vm.clone()));
        let mut groups = Groups::of(interval, *seconds, grouping, &usage.scope);
        groups.filter(&self.filter);
        groups.sort(self.sort);
        // The selection stays with what was selected.
        let place = chosen.and_then(|(name, vm)| {
            groups.entries.iter().position(|entry| entry.name == name && entry.vm == vm)
        });
        let last = groups.entries.len().saturating_sub(1);
        usage.selected = place.unwrap_or(usage.selected).min(last);
        usage.groups = Some(groups);
    }

    /// From the selected line to what it consists of.
    fn enter(&mut self) {
        let grouping = self.usage.grouping();
        let Some(entry) = self.usage.entry() else { return };
        if grouping == Grouping::File {
            return;
        }
        let mut scope = self.usage.scope.clone();
        // A container is one machine's.
        let has_machine = scope.0.iter().any(|(of, _)| *of == Grouping::Vm);
        if grouping != Grouping::Vm && !has_machine && !entry.vm.is_empty() {
            scope.0.push((Grouping::Vm, entry.vm.clone()));
        }
        scope.0.push((grouping, entry.name.clone()));
        if let Some((interval, _)) = &self.usage.interval {
            self.usage.grouping = Some(Groups::below(interval, grouping, &scope));
        }
        self.usage.scope = scope;
        self.usage.groups = None;
        self.usage.selected = 0;
    }

    /// One step back. Returns whether there was one.
    fn leave(&mut self) -> bool {
        let Some((grouping, _)) = self.usage.scope.0.pop() else { return false };
        // The machine that was added with a container goes with it.
        if grouping != Grouping::Vm
            && self.usage.scope.0.len() == 1
            && self.usage.scope.0[0].0 == Grouping::Vm
            && grouping == Grouping::Container
        {
            self.usage.scope.0.clear();
        }
        self.usage.grouping = Some(grouping);
        self.usage.groups = None;
        self.usage.selected = 0;
        true
    }

    /// Applies filter and order to what is shown.
    fn arrange(&mut self) {
        self.arrange_usage();
        let Some(mut interval) = self.unfiltered.clone() else { return };
        interval.filter(&self.filter);
        interval.sort(self.sort);
        let there = |name: &String| interval.disks.iter().any(|disk| disk.name == *name);
        if !self.selected.as_ref().is_some_and(there) {
            self.selected = interval.disks.first().map(|disk| disk.name.clone());
        }
        self.shown = Some(interval);
    }

    /// The disk's latest rates.
    pub fn history(&self, name: &str) -> impl DoubleEndedIterator<Item = f64> + Clone + '_ {
        self.history.get(name).into_iter().flatten().copied()
    }

    /// A disk of the last interval, whatever the filter says.
    pub fn disk(&self, name: &str) -> Option<&Disk> {
        self.unfiltered.as_ref()?.disks.iter().find(|disk| disk.name == name)
    }

    /// The selected disk's position.
    pub fn selected_index(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown.as_ref()?.disks.iter().position(|disk| disk.name == *selected)
    }

    /// Reacts to a key.
    pub fn key(&mut self, key: KeyEvent) {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            self.done = true;
        } else if self.typing {
            self.type_filter(key.code);
        } else if self.help {
            // Any key leaves the help.
            self.help = false;
        } else {
            self.command(key.code);
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(character) => self.filter.push(character),
            _ => {}
        }
        self.arrange();
    }

    fn command(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char('q') => self.done = true,
            KeyCode::Char('u') | KeyCode::Tab => {
                self.page = if self.page == Page::Usage { Page::Disks } else { Page::Usage };
            }
            KeyCode::Char('g') if self.page == Page::Usage => {
                self.usage.grouping = Some(self.usage.grouping().next());
                self.usage.groups = None;
                self.usage.selected = 0;
            }
            KeyCode::Enter | KeyCode::Right if self.page == Page::Usage => self.enter(),
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if self.page == Page::Usage => {
                let was_top = !self.leave();
                if was_top {
                    self.filter.clear();
                }
            }
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if self.page != Page::Disks => {
                self.page = Page::Disks;
            }
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char(' ' | 'p') => self.paused = !self.paused,
            KeyCode::Char('/') => {
                if self.page != Page::Usage {
                    self.page = Page::Disks;
                }
                self.typing = true;
            }
            KeyCode::Char('+' | '=') => self.change_interval(1),
            KeyCode::Char('-') => self.change_interval(-1),
            KeyCode::Char('<' | ',') => self.sort = self.sort.step(-1),
            KeyCode::Char('>' | '.') => self.sort = self.sort.step(1),
            KeyCode::Char('i') => self.sort = SortKey::Iops,
            KeyCode::Char('t') => self.sort = SortKey::Throughput,
            KeyCode::Char('d') => self.sort = SortKey::Depth,
            KeyCode::Char('l') => self.sort = SortKey::Latency,
            KeyCode::Char('e') => self.sort = SortKey::Errors,
            KeyCode::Char('n') => self.sort = SortKey::Name,
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::PageDown => self.select(10),
            KeyCode::PageUp => self.select(-10),
            KeyCode::Home => self.select(isize::MIN / 2),
            KeyCode::End => self.select(isize::MAX / 2),
            KeyCode::Enter | KeyCode::Right => {
                if let Some(name) = self.selected.clone() {
                    self.page = Page::Disk(name);
                }
            }
            _ => {}
        }
        self.arrange();
    }

    /// Moves the selection; on a disk's page, to the next disk's page.
    fn select(&mut self, by: isize) {
        if self.page == Page::Usage {
            let count = self.usage.groups.as_ref().map_or(0, |groups| groups.entries.len());
            let place = self.usage.selected as isize + by;
            self.usage.selected = place.clamp(0, (count as isize - 1).max(0)) as usize;
            return;
        }
        let (Some(index), Some(shown)) = (self.selected_index(), &self.shown) else { return };
        let last = shown.disks.len() as isize - 1;
        let index = (index as isize + by).clamp(0, last) as usize;
        let name = shown.disks[index].name.clone();
        if self.page != Page::Disks {
            self.page = Page::Disk(name.clone());
        }
        self.selected = Some(name);
    }

    fn change_interval(&mut self, by: isize) {
        let now = self.interval.as_millis() as u64;
        let position = INTERVALS_MS.iter().position(|&ms| ms >= now);
        let position = position.unwrap_or(INTERVALS_MS.len() - 1) as isize + by;
        let position = position.clamp(0, INTERVALS_MS.len() as isize - 1) as usize;
        self.interval = Duration::from_millis(INTERVALS_MS[position]);
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::model::tests::sample;
    use super::*;

    /// A view after two samples.
    pub fn app() -> App {
        let disks = |a: u64, b: u64| [("root", a), ("database-of-the-shop", b)];
        let first = sample(1_000_000_000, &disks(1000, 50));
        let mut app = App::new(first, Duration::from_secs(1), SortKey::Iops, String::new());
        app.sample(sample(2_000_000_000, &disks(25_000, 150)));
        app.sample(sample(3_000_000_000, &disks(60_000, 250)));
        app
    }

    fn press(app: &mut App, keys: &str) {
        for key in keys.chars() {
            let code = if key == '\n' { KeyCode::Enter } else { KeyCode::Char(key) };
            app.key(KeyEvent::new(code, KeyModifiers::NONE));
        }
    }

    #[test]
    fn keys_select_filter_and_leave() {
        let mut app = app();
        assert_eq!(app.selected.as_deref(), Some("root"));
        press(&mut app, "j");
        assert_eq!(app.selected.as_deref(), Some("database-of-the-shop"));
        press(&mut app, "\n");
        assert_eq!(app.page, Page::Disk("database-of-the-shop".into()));
        press(&mut app, "k");
        assert_eq!(app.page, Page::Disk("root".into()));
        press(&mut app, "/shop\n");
        assert_eq!(app.page, Page::Disks);
        assert_eq!(app.shown.as_ref().map(|interval| interval.disks.len()), Some(1));
        assert_eq!(app.selected.as_deref(), Some("database-of-the-shop"));
        press(&mut app, "?");
        assert!(app.help);
        press(&mut app, "qq");
        assert!(app.done);
    }

    #[test]
    fn enter_leads_from_containers_to_files_and_back() {
        use crate::usage::tests::usage;
        let mut app = app();
        press(&mut app, "u");
        assert_eq!(app.page, Page::Usage);
        app.sample_usage(UsageReport::default(), GuestList::default());
        app.sample_usage(usage(), GuestList::default());
        let name = |app: &App| app.usage.entry().map(|entry| entry.name.clone());
        assert_eq!(name(&app).as_deref(), Some("/database"));
        press(&mut app, "j\n");
        assert_eq!(app.usage.grouping(), Grouping::File);
        assert_eq!(app.usage.scope.text(), "shop › /web");
        assert_eq!(name(&app).as_deref(), Some("/srv/b"));
        app.key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
        assert_eq!((app.usage.grouping(), app.usage.scope.0.len()), (Grouping::Container, 0));
        press(&mut app, "\n");
        assert_eq!(app.usage.grouping(), Grouping::Process);
        assert_eq!(name(&app).as_deref(), Some("fio 12"));
        press(&mut app, "g/nothing\n");
        assert_eq!(name(&app), None);
        press(&mut app, "u");
        assert_eq!(app.page, Page::Disks);
    }

    #[test]
    fn a_pause_keeps_the_screen_and_intervals_step() {
        let mut app = app();
        press(&mut app, " ");
        let shown = app.shown.as_ref().map(|interval| interval.unix_time_ns);
        app.sample(sample(4_000_000_000, &[("root", 70_000)]));
        assert_eq!(app.shown.as_ref().map(|interval| interval.unix_time_ns), shown);
        press(&mut app, "+");
        assert_eq!(app.interval, Duration::from_secs(2));
        press(&mut app, "---------");
        assert_eq!(app.interval, Duration::from_millis(100));
        app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(app.done);
    }
}
