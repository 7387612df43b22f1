//! Parts of pictures (SVG).

use super::text::clean;

/// The begin of a picture with these sizes, in pixels; `</svg>` ends it.
pub fn begin(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"system-ui, 'DejaVu Sans', sans-serif\" \
         font-size=\"13\" fill=\"#2b3137\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    )
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
