use fathom_control::{FileDirty, LayerFigure, LayerFigures};
use ratatui::{Terminal, backend::TestBackend};

use super::super::app::tests::app;
use super::super::model::tests::{dirty, pagers, sample, with_log};
use super::*;

pub fn screen(app: &App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a test terminal");
    terminal.draw(|frame| draw(frame, app, true)).expect("it draws");
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned() + "\n").collect()
}

#[test]
fn disks_and_their_total_are_shown_at_any_width() {
    let app = app();
    for width in [40, 80, 120, 200] {
        let text = screen(&app, width, 12);
        for part in ["root", "database", "35.0k", "70.0k", "READ/S", "P99", "all 2", "by IOPS"] {
            assert!(text.contains(part), "{part} is missing at {width}:\n{text}");
        }
    }
    let text = screen(&app, 120, 12);
    assert!(text.contains("RECENT IOPS") && text.contains('█'), "{text}");
    assert!(text.contains("137M"), "{text}");
}

#[test]
fn a_disk_is_shown_by_operation_with_its_latencies() {
    let mut app = app();
    app.page = ViewPage::Disk("root".into());
    for (width, height) in [(40, 20), (80, 24), (120, 30)] {
        let text = screen(&app, width, height);
        for part in ["OPERATION", "flush", "LATENCY", "≤ ", "100 %"] {
            assert!(text.contains(part), "{part} is missing at {width}:\n{text}");
        }
    }
    app.page = ViewPage::Disk("gone".into());
    assert!(screen(&app, 80, 24).contains("does not serve gone any more"));
}

#[test]
fn a_disk_is_shown_with_the_figures_of_its_layers() {
    let mut app = app();
    app.page = ViewPage::Disk("root".into());
    let height = |text: &str| text.lines().take_while(|l| !l.contains("OPERATION")).count();
    let without = height(&screen(&app, 80, 24));
    app.sample(with_log(sample(10_000_000_000, &[("root", 100_000)]), 5));
    app.sample(with_log(sample(12_000_000_000, &[("root", 200_000)]), 11));
    let text = screen(&app, 80, 24);
    assert!(text.contains("\nwal: 1 MiB used, 3 rounds/s\n"), "{text}");
    // The layer whose figures are 0 takes no line.
    assert_eq!(height(&text), without + 1, "{text}");
    let text = screen(&app, 20, 24);
    assert!(text.contains("\nwal: 1 MiB used, 3\nrounds/s\n"), "{text}");
    let text = screen(&app, 80, 8);
    assert!(text.contains("OPERATION") && !text.contains("wal"), "{text}");
}

#[test]
fn hits_of_caches_have_a_column_on_wide_terminals() {
    let mut app = app();
    assert!(!screen(&app, 200, 24).contains(" HIT"), "without a cache there is no column");
    let with_cache = |seconds: u64, reads, hits| {
        let mut statistics =
            sample(seconds * 1_000_000_000, &[("root", 100_000), ("database-of-the-shop", 5)]);
        let figure =
            |name: &str, value| LayerFigure { name: name.into(), meaning: String::new(), value };
        let figures = vec![figure("reads_total", reads), figure("hits_total", hits)];
        statistics.disks[0].layers = vec![LayerFigures { layer: "cache".into(), figures }];
        statistics
    };
    app.sample(with_cache(10, 100, 10));
    app.sample(with_cache(11, 300, 160));
    let text = screen(&app, 200, 24);
    assert!(text.contains(" HIT") && text.contains("75 %") && text.contains("–"), "{text}");
    assert!(!screen(&app, 80, 24).contains(" HIT"));
}

#[test]
fn dirty_data_and_requests_that_are_held_back_have_columns() {
    let mut app = app();
    assert!(!screen(&app, 200, 24).contains("DIRTY"), "without a report there is no column");
    let mut report = dirty(["root", "database-of-the-shop"]);
    app.sample_dirty(&report, Default::default());
    for width in [80, 120, 200] {
        let text = screen(&app, width, 24);
        assert!(text.contains("DIRTY") && !text.contains("HELD"), "{text}");
        assert!(text.contains(" 4.00M") && text.contains(" 6.00M"), "{text}");
    }
    // A disk whose requests wait is shown as such on any width.
    let mut held = sample(10_000_000_000, &[("root", 100_000)]);
    let figure = LayerFigure { name: "waiting".into(), meaning: String::new(), value: 7 };
    held.disks[0].layers = vec![LayerFigures { layer: "limit".into(), figures: vec![figure] }];
    app.sample(held);
    let text = screen(&app, 50, 24);
    assert!(text.contains("HELD") && text.contains("      7"), "{text}");
    app.page = ViewPage::Disk("root".into());
    report.guests[0].devices = None;
    let file = |path: &str, kind: &str, dirty_bytes| FileDirty {
        path: path.into(),
        kind: kind.into(),
        device: "vda1".into(),
        dirty_bytes,
        ..FileDirty::default()
    };
    let files = vec![
        file("/var/\u{1b}[2Jlog", "data", 3 << 20),
        file("", "metadata", 4096),
        file("/no", "data", 0),
    ];
    app.sample_dirty(&report, ("root".into(), files.clone()));
    let text = screen(&app, 80, 40);
    assert!(text.contains("7 held back") && !text.contains("/no"), "{text}");
    assert!(text.contains("     3 MiB  vda1        /var/\u{fffd}[2Jlog"), "{text}");
    assert!(text.contains("     4 KiB  vda1        (metadata)"), "{text}");
    // Files of another disk's guest are not shown.
    app.sample_dirty(&report, ("other".into(), files));
    assert!(!screen(&app, 80, 40).contains("vda1"));
}

#[test]
fn memory_that_is_away_has_the_column_that_is_dropped_first() {
    let mut app = app();
    assert!(!screen(&app, 200, 24).contains("AWAY"), "without a pager there is no column");
    app.sample_away(&pagers(["root", "none"], 3 << 20));
    let text = screen(&app, 200, 24);
    assert!(text.contains("   AWAY") && text.contains(" 3.00M"), "{text}");
    // Whatever is shown without it is shown all the same when there is no room for it.
    let widest = (20..200).rev().find(|width| !screen(&app, *width, 24).contains("AWAY"));
    let narrow = screen(&app, widest.unwrap(), 24);
    for heading in ["OTHER/S", "MAX", "ERRORS", "RECENT IOPS"] {
        assert!(narrow.contains(heading), "{heading} at {widest:?}: {narrow}");
    }
    app.page = ViewPage::Disk("root".into());
    let text = screen(&app, 100, 24);
    assert!(text.contains(", 3 MiB of its memory away"), "{text}");
}

#[test]
fn no_size_is_too_small() {
    let mut app = app();
    for page in [ViewPage::Disks, ViewPage::Disk("root".into())] {
        app.page = page;
        for help in [false, true] {
            app.help = help;
            for (width, height) in [(1, 1), (5, 3), (20, 2), (30, 200)] {
                screen(&app, width, height);
            }
        }
    }
    // The whole help fits a terminal of the usual size.
    for (width, height) in [(80, 24), (200, 60)] {
        let text = screen(&app, width, height);
        assert!(text.contains("Keys") && text.contains("caches had wholly."), "{text}");
    }
}
