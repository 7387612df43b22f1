//! A picture of lifetimes (SVG): the share of the written bytes that died within each time, as in
//! Figures 4 and 5 of the Sky paper.

use std::fmt::Write as _;

use fathom_control::{DiskLifetimes, GroupedBy, Histogram, LifetimesGroup};

use super::{AGES, labels, percent};
use crate::output::svg::{self, COLOURS, DISK, escape};
use crate::output::text::{shorten, shorten_front};

const WIDTH: f64 = 1040.0;
const HEIGHT: f64 = 520.0;
/// The edges of the plot.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 720.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 448.0;
/// The shortest and the longest time, in nanoseconds.
const FROM_NS: f64 = 1e8;
const TO_NS: f64 = 86_400e9;
/// The most lines of groups.
const GROUPS_MAX: usize = 10;
/// The width of names in the legend, in characters.
const NAME_WIDTH: usize = 30;

struct Line<'a> {
    name: String,
    colour: &'a str,
    /// The pattern of a broken line.
    dashes: &'a str,
    born: u64,
    lives: &'a Histogram,
}

impl Line<'_> {
    fn share(&self, died: u64) -> f64 {
        (died as f64 / self.born.max(1) as f64).min(1.0)
    }
}

fn x(age_ns: f64) -> f64 {
    let part = (age_ns / FROM_NS).ln() / (TO_NS / FROM_NS).ln();
    LEFT + (RIGHT - LEFT) * part.clamp(0.0, 1.0)
}

fn y(share: f64) -> f64 {
    BOTTOM - (BOTTOM - TOP) * share.clamp(0.0, 1.0)
}

/// The picture of the lifetimes of a disk that has been followed for so long.
pub fn draw(disk: &DiskLifetimes, followed_ns: u64) -> String {
    let mut lines = Vec::new();
    let is_disk = |group: &&LifetimesGroup| group.by == GroupedBy::Disk;
    if let Some(whole) = disk.groups.iter().find(is_disk) {
        let (born, colour) = (whole.born_bytes, DISK);
        let lives = &whole.lifetimes;
        lines.push(Line { name: "the whole disk".into(), colour, dashes: "", born, lives });
        let (name, lives) = ("overwritten blocks alone".into(), &whole.naive_lifetimes);
        lines.push(Line { name, colour, dashes: "6 5", born, lives });
    }
    let groups = disk.groups.iter().filter(|group| group.by != GroupedBy::Disk);
    let groups = groups.filter(|group| group.born_bytes > 0);
    lines.extend(groups.take(GROUPS_MAX).zip(COLOURS).map(|(group, colour)| {
        let (by, name) = labels(group);
        let (name, born) = (format!("{by} {name}"), group.born_bytes);
        Line { name, colour, dashes: "", born, lives: &group.lifetimes }
    }));
    let mut picture = svg::begin(WIDTH, HEIGHT);
    head(&mut picture, disk);
    axes(&mut picture);
    // The disk's lines are above those of its groups.
    for line in lines.iter().rev() {
        curve(&mut picture, line, x(followed_ns as f64));
    }
    legend(&mut picture, &lines);
    picture.push_str("</svg>\n");
    picture
}

fn head(picture: &mut String, disk: &DiskLifetimes) {
    let title = format!("How long what is written to {} lives", shorten(&disk.disk, 40));
    let note = format!(
        "share of the written bytes that were overwritten, truncated or deleted within this time; \
         {} of the blocks are followed",
        percent(disk.share),
    );
    svg::head(picture, LEFT, &title, &note);
}

fn axes(picture: &mut String) {
    svg::percents(picture, LEFT, RIGHT, y);
    for (age, name) in std::iter::once((FROM_NS as u64, "0.1s")).chain(AGES) {
        svg::tick(picture, x(age as f64), BOTTOM, name);
    }
    let _ = writeln!(
        picture,
        "<line x1=\"{LEFT}\" y1=\"{BOTTOM}\" x2=\"{RIGHT}\" y2=\"{BOTTOM}\" stroke=\"#9aa4ad\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">lifetime</text>",
        f64::midpoint(LEFT, RIGHT),
        BOTTOM + 46.0,
    );
}

/// A line, which ends at `end`.
fn curve(picture: &mut String, line: &Line<'_>, end: f64) {
    let mut points = format!("{LEFT:.1},{:.1} ", y(0.0));
    let (mut died, mut above) = (0_u64, 0.0);
    for (index, bytes) in &line.lives.buckets {
        died = died.saturating_add(*bytes);
        let x = x(Histogram::value_max(*index) as f64).min(end);
        let share = line.share(died);
        // Points that nobody can tell apart are left out.
        if share - above > 0.002 || died == line.lives.count() {
            let _ = write!(points, "{x:.1},{:.1} {x:.1},{:.1} ", y(above), y(share));
            above = share;
        }
    }
    let _ = write!(points, "{end:.1},{:.1}", y(above));
    let width = if line.colour == DISK { 3.0 } else { 1.8 };
    let _ = writeln!(
        picture,
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" stroke-dasharray=\"{}\" \
         stroke-linejoin=\"round\" points=\"{points}\"/>",
        line.colour, line.dashes,
    );
}

/// The lines' names, and the shares that died.
fn legend(picture: &mut String, lines: &[Line<'_>]) {
    let left = RIGHT + 24.0;
    let _ = writeln!(
        picture,
        "<g font-size=\"12\"><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" \
         fill=\"#68727c\">died</text>",
        WIDTH - 14.0,
        TOP - 2.0,
    );
    for (row, line) in lines.iter().enumerate() {
        let y = TOP + 20.0 + row as f64 * 22.0;
        let _ = writeln!(
            picture,
            "<line x1=\"{left}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\" \
             stroke-width=\"3\" stroke-dasharray=\"{}\"/><text x=\"{:.1}\" y=\"{y:.1}\">{}</text>\
             <text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>",
            y - 4.0,
            left + 22.0,
            y - 4.0,
            line.colour,
            line.dashes,
            left + 28.0,
            escape(&shorten_front(&line.name, NAME_WIDTH)),
            WIDTH - 14.0,
            percent(line.share(line.lives.count())),
        );
    }
    picture.push_str("</g>\n");
}

#[cfg(test)]
mod tests {
    use super::{super::tests::disk, *};

    #[test]
    fn a_picture_has_the_naive_view_and_groups() {
        let picture = draw(&disk(), u64::MAX);
        assert_eq!(picture.matches("<polyline").count(), 7);
        for part in ["overwritten blocks alone", "the whole disk", "80 %", "20 %", "lifetime"] {
            assert!(picture.contains(part), "{part} is missing:\n{picture}");
        }
    }

    #[test]
    fn anything_can_be_drawn() {
        let mut disk = disk();
        for name in ["</text><script>", "\u{0}\u{ffff}\u{1b}\u{202e}\"'&", &"日".repeat(5000)] {
            disk.disk = name.into();
            disk.groups[3].name = name.into();
            disk.groups[3].lifetimes.record(u64::MAX, u64::MAX);
            disk.groups[3].lifetimes.record(0, u64::MAX);
            let picture = draw(&disk, 0);
            assert!(!picture.contains("<script") && !picture.contains("NaN"), "{name}");
            assert!(picture.len() < 30_000 && !picture.contains('\u{202e}'));
            assert_eq!(picture.matches('<').count(), picture.matches('>').count());
        }
        assert!(draw(&DiskLifetimes::default(), 1).ends_with("</svg>\n"));
    }
}
