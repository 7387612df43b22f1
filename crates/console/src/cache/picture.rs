//! A picture of miss-ratio curves (SVG): the hit ratio by size, of a disk and its containers.
use std::fmt::Write as _;

use fathom_control::{Bytes, CacheCurve, CacheDisk};

use super::curve::{hit_ratio, useful_size};
use super::span;
use crate::output::svg::{self, COLOURS, DISK, escape};
use crate::output::text::{clean, shorten, shorten_front};
use crate::usage::container_name;

const WIDTH: f64 = 1040.0;
const HEIGHT: f64 = 540.0;
/// The edges of the plot.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 690.0;
const TOP: f64 = 88.0;
const BOTTOM: f64 = 468.0;
/// The greatest size shown, in present sizes, unless the cache has only a trace of what it could
/// use.
const SIZES_MAX: u64 = 8;
/// The part of the useful size that is a trace.
const TRACE: u64 = 64;
/// The most labelled sizes.
const TICKS_MAX: u64 = 8;
/// The most lines of containers.
const GROUPS_MAX: usize = 12;
/// The width of names in the legend, in characters.
const NAME_WIDTH: usize = 26;

/// A line of the picture.
struct Line<'a> {
    name: String,
    colour: &'a str,
    curve: &'a CacheCurve,
}

/// The scale of the picture.
struct Scale {
    size_max: u64,
    step: u64,
}

impl Scale {
    /// Shows where the curves of `lines` still rise, and at least twice the present size.
    fn of(lines: &[Line<'_>], present: u64) -> Self {
        let useful = lines.iter().map(|line| useful_size(line.curve)).max().unwrap_or(0);
        let present = present.max(1 << 20);
        let most =
            if present < useful / TRACE { u64::MAX } else { present.saturating_mul(SIZES_MAX) };
        let wanted = useful.saturating_add(useful / 10).clamp(present.saturating_mul(2), most);
        let mut step = 1_u64 << 12;
        while wanted.div_ceil(step) > TICKS_MAX && step < 1 << 62 {
            step *= 2;
        }
        Self { size_max: wanted.div_ceil(step).saturating_mul(step), step }
    }

    fn x(&self, size: u64) -> f64 {
        LEFT + (RIGHT - LEFT) * size as f64 / self.size_max as f64
    }
}

fn y(ratio: f64) -> f64 {
    BOTTOM - (BOTTOM - TOP) * ratio.clamp(0.0, 1.0)
}

/// The picture of a disk's curves.
pub fn draw(disk: &CacheDisk) -> String {
    let name = if disk.groups.is_empty() { "the disk" } else { "the whole disk" };
    let mut lines = vec![Line { name: name.into(), colour: DISK, curve: &disk.curve }];
    let groups = disk.groups.iter().filter(|group| group.curve.accesses > 0);
    lines.extend(groups.take(GROUPS_MAX).zip(COLOURS).map(|(group, colour)| Line {
        name: container_name(&group.cgroup),
        colour,
        curve: &group.curve,
    }));
    let present = disk.curve.size_bytes;
    let scale = Scale::of(&lines, present);
    let mut picture = String::new();
    picture.push_str(&svg::begin(WIDTH, HEIGHT));
    head(&mut picture, disk);
    axes(&mut picture, &scale);
    // The disk's line is above those of its containers.
    for line in lines.iter().rev() {
        curve(&mut picture, line, &scale);
    }
    mark(&mut picture, &disk.curve, &scale);
    legend(&mut picture, &lines, present);
    picture.push_str("</svg>\n");
    picture
}

fn head(picture: &mut String, disk: &CacheDisk) {
    let curve = &disk.curve;
    let title = format!("What a cache of another size would do for {}", shorten(&disk.name, 40));
    let note = format!(
        "LRU, from {} accesses to blocks of the last {}; {:.1} % of the blocks are followed",
        curve.accesses,
        span(curve.window_ns),
        curve.sampled * 100.0,
    );
    svg::head(picture, LEFT, &title, &note);
}

fn axes(picture: &mut String, scale: &Scale) {
    svg::percents(picture, LEFT, RIGHT, y);
    let sizes = (0..=TICKS_MAX).map(|tick| scale.step.saturating_mul(tick));
    for size in sizes.take_while(|size| *size <= scale.size_max) {
        let label = if size == 0 { "0".to_owned() } else { Bytes(size).to_string() };
        svg::tick(picture, scale.x(size), BOTTOM, &label);
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    let _ = writeln!(
        picture,
        "<line x1=\"{LEFT}\" y1=\"{BOTTOM}\" x2=\"{RIGHT}\" y2=\"{BOTTOM}\" stroke=\"#9aa4ad\"/>\n\
         <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">size of the cache</text>\n\
         <text transform=\"translate(20 {:.1}) rotate(-90)\" text-anchor=\"middle\">share of the \
         accesses that hit</text>",
        BOTTOM + 48.0,
        f64::midpoint(TOP, BOTTOM),
    );
}

fn curve(picture: &mut String, line: &Line<'_>, scale: &Scale) {
    let mut points = String::new();
    let inside = line.curve.points.iter().filter(|(size, _)| *size <= scale.size_max);
    for (size, miss_ratio) in inside {
        let _ = write!(points, "{:.1},{:.1} ", scale.x(*size), y(1.0 - miss_ratio));
    }
    // The line goes on to the edge.
    let _ = write!(points, "{RIGHT:.1},{:.1}", y(hit_ratio(line.curve, scale.size_max)));
    let width = if line.colour == DISK { 3.0 } else { 1.8 };
    let _ = writeln!(
        picture,
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" stroke-linejoin=\"round\" \
         points=\"{points}\"/>",
        line.colour,
    );
}

/// Marks the present size.
fn mark(picture: &mut String, curve: &CacheCurve, scale: &Scale) {
    let ratio = hit_ratio(curve, curve.size_bytes);
    let (x, y) = (scale.x(curve.size_bytes), y(ratio));
    let _ = writeln!(
        picture,
        "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{BOTTOM}\" stroke=\"#2b3137\" \
         stroke-dasharray=\"4 4\"/>\
         <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{DISK}\" stroke=\"#ffffff\" \
         stroke-width=\"2\"/>\n\
         <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"600\">now {}: {:.1} %</text>",
        TOP - 4.0,
        TOP - 9.0,
        Bytes(curve.size_bytes),
        ratio * 100.0,
    );
}

/// The lines' names, and the hit ratios at the present size and at twice that.
fn legend(picture: &mut String, lines: &[Line<'_>], present: u64) {
    let left = RIGHT + 24.0;
    let _ = writeln!(
        picture,
        "<g font-size=\"12\"><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" \
         fill=\"#68727c\">now</text><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" \
         fill=\"#68727c\">+100 %</text>",
        WIDTH - 76.0,
        TOP - 2.0,
        WIDTH - 14.0,
        TOP - 2.0,
    );
    for (row, line) in lines.iter().enumerate() {
        let y = TOP + 20.0 + row as f64 * 22.0;
        let bold = if line.colour == DISK { " font-weight=\"600\"" } else { "" };
        let percent = |size| format!("{:.0} %", hit_ratio(line.curve, size) * 100.0);
        let _ = writeln!(
            picture,
            "<line x1=\"{left}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\" \
             stroke-width=\"3\"/><text x=\"{:.1}\" y=\"{y:.1}\"{bold}>{}</text>\
             <text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\"{bold}>{}</text>\
             <text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\"{bold}>{}</text>",
            y - 4.0,
            left + 16.0,
            y - 4.0,
            line.colour,
            left + 22.0,
            escape(&shorten_front(&clean(&line.name), NAME_WIDTH)),
            WIDTH - 76.0,
            percent(present),
            WIDTH - 14.0,
            percent(present.saturating_mul(2)),
        );
    }
    picture.push_str("</g>\n");
}

#[cfg(test)]
mod tests {
    use super::{super::tests::report, *};

    #[test]
    fn a_picture_has_labelled_axes_and_a_line_for_each_container() {
        let report = report(1);
        let picture = draw(&report.caches[0].disks[0]);
        assert_eq!(picture.matches("<polyline").count(), 3);
        for part in ["now 1 GiB: 75.0 %", "512 MiB", "100 %", "size of the cache", "the whole disk"]
        {
            assert!(picture.contains(part), "{part} is missing:\n{picture}");
        }
    }

    #[test]
    fn names_of_a_guest_cannot_break_the_picture() {
        let mut report = report(1);
        let disk = &mut report.caches[0].disks[0];
        let number = disk.groups.len();
        for name in ["</text><script>", "\u{0}\u{ffff}\u{1b}\u{202e}\"'&", &"日".repeat(5000)] {
            disk.groups[number - 1].cgroup = name.into();
            let picture = draw(disk);
            assert!(!picture.contains("<script") && picture.len() < 20_000, "{name}");
            let is_bad = |c: char| c.is_control() && c != '\n' || c > '\u{fffd}' || c == '\u{202e}';
            assert!(!picture.contains(is_bad));
            // All tags are closed, and no other text has an angle bracket.
            assert_eq!(picture.matches('<').count(), picture.matches('>').count());
        }
    }

    #[test]
    fn any_curve_can_be_drawn() {
        for (size, points) in [
            (0, vec![]),
            (0, vec![(0, 1.0)]),
            (u64::MAX, vec![(0, 1.0), (u64::MAX, 0.0)]),
            (1 << 40, vec![(0, f64::NAN), (1 << 62, -3.0)]),
        ] {
            let curve =
                CacheCurve { size_bytes: size, points, accesses: 1, ..CacheCurve::default() };
            let picture = draw(&CacheDisk { curve, ..CacheDisk::default() });
            assert!(picture.ends_with("</svg>\n") && picture.len() < 10_000);
        }
    }
}
