//! Parts of pictures (SVG).

use std::fmt::Write as _;

use super::text::clean;

/// Colours that are told apart by people who do not see all colours (after Okabe and Ito), and then
/// darker ones.
pub const COLOURS: [&str; 12] = [
    "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#7a4ea3", "#00655b",
    "#a3123f", "#5c6670", "#b07aa1", "#3b7d23",
];
/// The colour of the line of a whole disk.
pub const DISK: &str = "#0b4f8a";

/// The begin of a picture with these sizes, in pixels; `</svg>` ends it.
pub fn begin(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"system-ui, 'DejaVu Sans', sans-serif\" \
         font-size=\"13\" fill=\"#2b3137\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    )
}

/// The title of a picture, and a note below it.
pub fn head(picture: &mut String, left: f64, title: &str, note: &str) {
    let _ = writeln!(
        picture,
        "<text x=\"{left}\" y=\"32\" font-size=\"19\" font-weight=\"600\">{}</text>\n\
         <text x=\"{left}\" y=\"53\" fill=\"#68727c\">{}</text>",
        escape(title),
        escape(note),
    );
}

/// The lines of a plot from 0 to 100 %, from `left` to `right`. `y` is the place of a share.
pub fn percents(picture: &mut String, left: f64, right: f64, y: impl Fn(f64) -> f64) {
    for percent in (0..=100).step_by(20) {
        let y = y(f64::from(percent) / 100.0);
        let _ = writeln!(
            picture,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#e3e7eb\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{percent} %</text>",
            left - 10.0,
            y + 4.5,
        );
    }
}

/// A labelled mark below a plot that ends at `bottom`.
pub fn tick(picture: &mut String, x: f64, bottom: f64, label: &str) {
    let _ = writeln!(
        picture,
        "<line x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#9aa4ad\"/>\
         <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
        bottom + 5.0,
        bottom + 22.0,
    );
}

/// Text that is safe in XML, whatever a guest has put into it.
pub fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for character in clean(text).chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}
