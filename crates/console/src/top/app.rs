//! The state of the live view, and the effects of keys.
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use fathom_control::{DirtyReport, FileDirty, GuestInfo, PagerReport, Statistics, UsageReport};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    model::{DiskSample, Interval, SortKey},
    usage_view::UsageView,
};
use crate::usage::Grouping;

/// The number of intervals remembered.
const HISTORY: usize = 240;
/// The intervals that + and - select.
const INTERVALS_MS: [u64; 8] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000];

/// A page of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewPage {
    /// All disks.
    Disks,
    /// One disk by operation.
    Disk(String),
    /// The I/O by machine, container, process, file or kind.
    Usage,
}

/// The state of the live view.
pub struct App {
    /// The daemon's control socket, for the title.
    pub socket: String,
    /// Time between samples.
    pub interval: Duration,
    /// The order of the disks.
    pub sort: SortKey,
    /// The text that names must contain.
    pub filter: String,
    /// Whether the filter is being typed.
    pub typing: bool,
    /// Whether the screen is paused.
    pub paused: bool,
    /// Whether the keys are shown.
    pub help: bool,
    /// The page shown.
    pub page: ViewPage,
    /// The selected disk.
    pub selected: Option<String>,
    /// The state of the usage page.
    pub usage: UsageView,
    /// The last interval, filtered and sorted.
    pub shown: Option<Interval>,
    /// The error of the last sample, if it failed.
    pub error: Option<String>,
    /// Whether the user has quit.
    pub quit: bool,
    /// A disk, and the files of its guest with the most dirty pages, if they were counted.
    pub dirty_files: (String, Vec<FileDirty>),
    unfiltered: Option<Interval>,
    before: Statistics,
    history: HashMap<String, VecDeque<f64>>,
}

impl App {
    /// A view that compares the next sample with `first`.
    pub fn new(first: Statistics, interval: Duration, sort: SortKey, filter: String) -> Self {
        Self {
            socket: String::new(),
            interval,
            sort,
            filter,
            typing: false,
            paused: false,
            help: false,
            page: ViewPage::Disks,
            selected: None,
            usage: UsageView::default(),
            shown: None,
            error: None,
            quit: false,
            dirty_files: (String::new(), Vec::new()),
            unfiltered: None,
            before: first,
            history: HashMap::new(),
        }
    }

    /// Takes the next sample.
    pub fn sample(&mut self, after: Statistics) {
        let interval = Interval::between(&self.before, &after);
        self.before = after;
        self.error = None;
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

    /// Takes the guests' dirty pages at the time of the last sample.
    pub fn sample_dirty(&mut self, report: &DirtyReport, files: (String, Vec<FileDirty>)) {
        if !self.paused {
            self.dirty_files = files;
            if let Some(interval) = &mut self.unfiltered {
                interval.set_dirty(report);
            }
            self.arrange();
        }
    }

    /// Takes what the guests' pagers have taken away at the time of the last sample.
    pub fn sample_away(&mut self, report: &PagerReport) {
        if !self.paused {
            if let Some(interval) = &mut self.unfiltered {
                interval.set_away(report);
            }
            self.arrange();
        }
    }

    /// Shows the usage page, grouped by `grouping`.
    pub fn show_usage(&mut self, grouping: Grouping) {
        if let ViewPage::Disk(name) = &self.page {
            self.usage.show_disk(name);
        }
        self.page = ViewPage::Usage;
        self.usage.group_by(grouping);
    }

    /// Takes the next sample of the usage.
    pub fn sample_usage(&mut self, after: UsageReport, guests: Vec<GuestInfo>) {
        self.usage.sample(after, !self.paused);
        if !self.paused {
            self.usage.guests = guests;
            self.usage.arrange(self.sort, &self.filter);
            self.usage.remember();
        }
    }

    /// Moves by a number of tabs: the disks, and the groupings of the usage page.
    fn step_tab(&mut self, by: isize) {
        let count = Grouping::ALL.len() as isize + 1;
        self.show_tab((self.tab() as isize + by).rem_euclid(count) as usize);
    }

    /// The index of the tab shown.
    pub fn tab(&self) -> usize {
        let is_shown = |it: &Grouping| self.page == ViewPage::Usage && *it == self.usage.grouping;
        Grouping::ALL.iter().position(is_shown).map_or(0, |place| place + 1)
    }

    /// Shows the tab with this index, if it exists.
    fn show_tab(&mut self, tab: usize) {
        match tab.checked_sub(1).map(|place| Grouping::ALL.get(place)) {
            None => self.page = ViewPage::Disks,
            Some(Some(grouping)) => self.show_usage(*grouping),
            Some(None) => {}
        }
    }

    /// Applies filter and order to the page shown.
    fn arrange(&mut self) {
        self.usage.arrange(self.sort, &self.filter);
        let Some(mut interval) = self.unfiltered.clone() else { return };
        interval.filter(&self.filter);
        interval.sort(self.sort);
        let there = |name: &String| interval.disks.iter().any(|disk| disk.name == *name);
        if !self.selected.as_ref().is_some_and(there) {
            self.selected = interval.disks.first().map(|disk| disk.name.clone());
        }
        self.shown = Some(interval);
    }

    /// The disk's latest rates, in requests per second.
    pub fn history(&self, name: &str) -> impl DoubleEndedIterator<Item = f64> + Clone + '_ {
        self.history.get(name).into_iter().flatten().copied()
    }

    /// A disk of the last interval, regardless of the filter.
    pub fn disk(&self, name: &str) -> Option<&DiskSample> {
        self.unfiltered.as_ref()?.disks.iter().find(|disk| disk.name == name)
    }

    /// The selected disk's position.
    pub fn selected_index(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown.as_ref()?.disks.iter().position(|disk| disk.name == *selected)
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            self.quit = true;
        } else if self.typing {
            self.type_filter(key.code);
        } else if self.help {
            // Any key closes the help.
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
            KeyCode::Char('q') => self.quit = true,
            KeyCode::Char('u') if self.page == ViewPage::Usage => self.page = ViewPage::Disks,
            KeyCode::Char('u') => self.show_usage(self.usage.grouping),
            KeyCode::Tab => self.step_tab(1),
            KeyCode::BackTab => self.step_tab(-1),
            KeyCode::Char(digit @ '1'..='9') => self.show_tab(digit as usize - '1' as usize),
            KeyCode::Char('g') if self.page == ViewPage::Usage => {
                self.usage.group_by(self.usage.grouping.next());
            }
            KeyCode::Enter | KeyCode::Right if self.page == ViewPage::Usage => {
                self.usage.enter(&mut self.filter);
            }
            KeyCode::Char('x') if self.page == ViewPage::Usage => self.usage.open_selected(),
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if self.page == ViewPage::Usage => {
                self.usage.go_back(&mut self.filter);
            }
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if self.page != ViewPage::Disks => {
                self.page = ViewPage::Disks;
            }
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char(' ' | 'p') => self.paused = !self.paused,
            KeyCode::Char('/') => {
                if self.page != ViewPage::Usage {
                    self.page = ViewPage::Disks;
                }
                self.usage.opened = None;
                self.typing = true;
            }
            KeyCode::Char('+' | '=') => self.change_interval(1),
            KeyCode::Char('-') => self.change_interval(-1),
            KeyCode::Char('<' | ',') => self.step_sort(-1),
            KeyCode::Char('>' | '.') => self.step_sort(1),
            KeyCode::Char('i') => self.sort = SortKey::Iops,
            KeyCode::Char('t') => self.sort = SortKey::Throughput,
            KeyCode::Char('r') => self.sort = SortKey::Read,
            KeyCode::Char('w') => self.sort = SortKey::Written,
            KeyCode::Char('d') => self.sort = SortKey::Depth,
            KeyCode::Char('l') => self.sort = SortKey::Latency,
            KeyCode::Char('e') => self.sort = SortKey::Errors,
            KeyCode::Char('y') => self.sort = SortKey::Dirty,
            KeyCode::Char('n') => self.sort = SortKey::Name,
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::PageDown => self.select(10),
            KeyCode::PageUp => self.select(-10),
            KeyCode::Home => self.select(isize::MIN / 2),
            KeyCode::End => self.select(isize::MAX / 2),
            KeyCode::Enter | KeyCode::Right => {
                if let Some(name) = self.selected.clone() {
                    self.page = ViewPage::Disk(name);
                }
            }
            _ => {}
        }
        self.arrange();
    }

    /// Moves the selection; on a disk's page, shows another disk.
    fn select(&mut self, by: isize) {
        if self.page == ViewPage::Usage {
            self.usage.select(by);
            return;
        }
        let (Some(index), Some(shown)) = (self.selected_index(), &self.shown) else { return };
        let last = shown.disks.len() as isize - 1;
        let index = (index as isize + by).clamp(0, last) as usize;
        let name = shown.disks[index].name.clone();
        if self.page != ViewPage::Disks {
            self.page = ViewPage::Disk(name.clone());
        }
        self.selected = Some(name);
    }

    fn step_sort(&mut self, by: isize) {
        self.sort = self.sort.step(by);
        // Accounts have no errors and no dirty data.
        while self.page == ViewPage::Usage && matches!(self.sort, SortKey::Errors | SortKey::Dirty)
        {
            self.sort = self.sort.step(by);
        }
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
        assert_eq!(app.page, ViewPage::Disk("database-of-the-shop".into()));
        press(&mut app, "k");
        assert_eq!(app.page, ViewPage::Disk("root".into()));
        press(&mut app, "/shop\n");
        assert_eq!(app.page, ViewPage::Disks);
        assert_eq!(app.shown.as_ref().map(|interval| interval.disks.len()), Some(1));
        assert_eq!(app.selected.as_deref(), Some("database-of-the-shop"));
        press(&mut app, "?");
        assert!(app.help);
        press(&mut app, "qq");
        assert!(app.quit);
    }

    /// The same, on the usage page.
    pub fn usage_app(keys: &str) -> App {
        use super::super::usage_view::tests::samples;
        let mut app = app();
        press(&mut app, "u");
        let (before, after) = samples();
        let mut guest = GuestInfo { vm: "shop".into(), ..GuestInfo::default() };
        guest.insight.state = fathom_control::InsightState::Attached;
        guest.insight.release = "6.1.0-56-cloud-amd64".into();
        app.sample_usage(before, vec![guest.clone()]);
        app.sample_usage(after, vec![guest]);
        press(&mut app, keys);
        app
    }

    #[test]
    fn tabs_wrap_around_and_enter_opens_a_line() {
        let name = |app: &App| app.usage.entry().map(|entry| entry.name.clone());
        let mut app = usage_app("");
        assert_eq!((&app.page, name(&app).as_deref()), (&ViewPage::Usage, Some("/database")));
        press(&mut app, "2\nj\n");
        assert_eq!(
            (app.usage.scope.text().as_str(), name(&app).as_deref()),
            ("shop › /web", Some("/srv/b"))
        );
        press(&mut app, "w>>>>");
        assert_eq!(app.sort, SortKey::Iops, "errors are skipped, and the order wraps around");
        press(&mut app, "/table");
        assert_eq!(name(&app), None);
        app.key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
        press(&mut app, "\n");
        assert!(app.usage.opened.is_some());
        press(&mut app, "6");
        assert_eq!((app.usage.grouping, name(&app).as_deref()), (Grouping::Kind, Some("data")));
        press(&mut app, "9gg");
        assert_eq!(app.usage.grouping, Grouping::Vm);
        app.key(KeyEvent::new(KeyCode::BackTab, KeyModifiers::SHIFT));
        assert_eq!(app.page, ViewPage::Disks);
        app.key(KeyEvent::new(KeyCode::BackTab, KeyModifiers::SHIFT));
        assert_eq!((&app.page, app.usage.grouping), (&ViewPage::Usage, Grouping::Database));
        app.key(KeyEvent::new(KeyCode::Tab, KeyModifiers::NONE));
        assert_eq!(app.page, ViewPage::Disks);
        // From a disk's page the usage page shows that disk.
        press(&mut app, "\n3");
        assert_eq!(
            (app.usage.grouping, app.usage.scope.text().as_str()),
            (Grouping::Container, "disk root")
        );
        press(&mut app, "u");
        assert_eq!(app.page, ViewPage::Disks);
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
        assert!(app.quit);
    }
}
