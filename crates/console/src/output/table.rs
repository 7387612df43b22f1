//! Tables that fit the terminal.
//!
//! A table that is too wide first loses the columns of the least importance, then shortens its
//! flexible columns, longest first. Piped, it keeps everything.
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::style::{self, Style};

/// The gap between two columns.
const GAP: usize = 2;
/// A shortened column keeps at least this much.
const SHORT: usize = 8;

/// A column's heading and how it gives way.
#[derive(Clone, Debug)]
pub struct Column {
    heading: &'static str,
    right: bool,
    flexible: bool,
    importance: u8,
}

impl Column {
    /// A column of text.
    pub fn text(heading: &'static str) -> Self {
        Self { heading, right: false, flexible: false, importance: u8::MAX }
    }

    /// A column of numbers, set to the right.
    pub fn number(heading: &'static str) -> Self {
        Self { right: true, ..Self::text(heading) }
    }

    /// May be shortened.
    #[must_use]
    pub fn flexible(self) -> Self {
        Self { flexible: true, ..self }
    }

    /// May be left out; the least important first.
    #[must_use]
    pub fn importance(self, importance: u8) -> Self {
        Self { importance, ..self }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// Adds a row of as many cells as there are columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    /// The table as lines, none wider than `width`.
    pub fn render(&self, width: Option<usize>, style: Style) -> String {
        let natural: Vec<usize> = (0..self.columns.len())
            .map(|index| {
                let cells = self.rows.iter().map(|row| row[index].width());
                cells.fold(self.columns[index].heading.width(), usize::max)
            })
            .collect();
        let (shown, widths) = self.fit(natural, width.unwrap_or(usize::MAX));
        let mut lines = Vec::with_capacity(self.rows.len() + 1);
        let headings: Vec<String> = self.columns.iter().map(|c| c.heading.to_owned()).collect();
        let heading = self.line(&headings, &shown, &widths, width);
        lines.push(style.paint(style::DIM, &heading));
        lines.extend(self.rows.iter().map(|row| self.line(row, &shown, &widths, width)));
        lines.join("\n")
    }

    /// Chooses columns and their widths.
    fn fit(&self, mut widths: Vec<usize>, width: usize) -> (Vec<usize>, Vec<usize>) {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let total = |shown: &[usize], widths: &[usize]| {
            shown.iter().map(|&index| widths[index] + GAP).sum::<usize>().saturating_sub(GAP)
        };
        loop {
            let excess = total(&shown, &widths).saturating_sub(width);
            if excess == 0 {
                break;
            }
            // Flexible columns give what they can if that is enough; else a column goes.
            let spare: usize = shown
                .iter()
                .filter(|&&index| self.columns[index].flexible)
                .map(|&index| widths[index].saturating_sub(SHORT))
                .sum();
            let least = shown
                .iter()
                .copied()
                .filter(|&index| self.columns[index].importance < u8::MAX)
                .min_by_key(|&index| self.columns[index].importance);
            match least {
                Some(index) if spare < excess => shown.retain(|&other| other != index),
                _ => {
                    let longest = shown
                        .iter()
                        .copied()
                        .filter(|&index| self.columns[index].flexible && widths[index] > SHORT)
                        .max_by_key(|&index| widths[index]);
                    match longest {
                        Some(index) => widths[index] -= 1,
                        None => break,
                    }
                }
            }
        }
        (shown, widths)
    }

    fn line(
        &self,
        cells: &[String],
        shown: &[usize],
        widths: &[usize],
        width: Option<usize>,
    ) -> String {
        let mut line = String::new();
        for (position, &index) in shown.iter().enumerate() {
            let cell = shorten(&cells[index], widths[index]);
            let padding = " ".repeat(widths[index] - cell.width());
            if position > 0 {
                line.push_str(&" ".repeat(GAP));
            }
            if self.columns[index].right {
                line.push_str(&padding);
                line.push_str(&cell);
            } else {
                line.push_str(&cell);
                line.push_str(&padding);
            }
        }
        let line = line.trim_end();
        // Nothing more can give way: cut rather than break the line.
        width.map_or_else(|| line.to_owned(), |width| shorten(line, width))
    }
}

/// The text, cut to a width with an ellipsis if need be.
pub fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut shortened = String::new();
    let mut used = 1;
    for character in text.chars() {
        used += character.width().unwrap_or(0);
        if used > width {
            break;
        }
        shortened.push(character);
    }
    if width > 0 {
        shortened.push('…');
    }
    shortened
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new([
            Column::text("NAME").flexible(),
            Column::number("SIZE"),
            Column::text("STATE").importance(3),
            Column::text("IMAGE").flexible().importance(2),
            Column::number("QUEUES").importance(1),
        ]);
        let cells = ["root", "10 GiB", "connected", "/var/lib/fathom/images/root.img", "4"];
        table.row(cells.map(str::to_owned));
        let cells =
            ["a-very-long-name-of-a-disk", "1.5 TiB", "idle", "/srv/müllhalde/data.img", "1"];
        table.row(cells.map(str::to_owned));
        table
    }

    fn widest(text: &str) -> usize {
        text.lines().map(UnicodeWidthStr::width).max().unwrap_or(0)
    }

    #[test]
    fn wide_and_piped_tables_show_everything() {
        let text = table().render(None, Style::PLAIN);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("/var/lib/fathom/images/root.img"));
        assert_eq!(text, table().render(Some(200), Style::PLAIN));
    }

    #[test]
    fn at_80_columns_the_longest_cells_are_shortened() {
        let text = table().render(Some(80), Style::PLAIN);
        assert!(widest(&text) <= 80, "{text}");
        for heading in ["NAME", "SIZE", "STATE", "IMAGE", "QUEUES"] {
            assert!(text.contains(heading), "{heading} is missing:\n{text}");
        }
        assert!(text.contains('…'), "{text}");
    }

    #[test]
    fn at_40_columns_unimportant_columns_go() {
        let text = table().render(Some(40), Style::PLAIN);
        assert!(widest(&text) <= 40, "{text}");
        assert!(!text.contains("QUEUES"), "{text}");
        assert!(text.contains("SIZE") && text.contains("1.5 TiB"), "{text}");
    }

    #[test]
    fn nothing_is_too_narrow() {
        for width in 1..30 {
            assert!(widest(&table().render(Some(width), Style::PLAIN)) <= width);
        }
        assert_eq!(shorten("müll", 3), "mü…");
        assert_eq!(shorten("ab", 0), "");
    }
}
