//! Tables that fit the terminal.
//!
//! A table that is too wide first drops its least important columns, then shortens its flexible
//! columns, the longest first. A table that is written to a pipe is complete. Crates for tables
//! wrap or truncate cells, and do not support an order of importance.
use unicode_width::UnicodeWidthStr;

use super::{
    style::{self, Style},
    text::{shorten, shorten_front},
};

/// The gap between two columns.
const GAP: usize = 2;
/// The least width to which a column is shortened by default.
const WIDTH_MIN: usize = 8;

/// A column: its heading, and how it is reduced in a narrow table.
#[derive(Clone, Debug)]
pub struct TableColumn {
    heading: &'static str,
    right: bool,
    flexible: bool,
    /// Whether the end of a shortened path is kept.
    path: bool,
    width_min: usize,
    /// Whether the column is omitted if all its cells are empty.
    optional: bool,
    importance: u8,
}

impl TableColumn {
    /// A column of text.
    pub fn text(heading: &'static str) -> Self {
        Self {
            heading,
            right: false,
            flexible: false,
            path: false,
            width_min: WIDTH_MIN,
            optional: false,
            importance: u8::MAX,
        }
    }

    /// A column of numbers, aligned to the right.
    pub fn number(heading: &'static str) -> Self {
        Self { right: true, ..Self::text(heading) }
    }

    /// Allows the column to be shortened.
    #[must_use]
    pub fn flexible(self) -> Self {
        Self { flexible: true, ..self }
    }

    /// Allows the column to be shortened to `width_min`; the end of a path is kept.
    #[must_use]
    pub fn flexible_path(self, width_min: usize) -> Self {
        Self { flexible: true, path: true, width_min, ..self }
    }

    /// Omits the column if all its cells are empty.
    #[must_use]
    pub fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Allows the column to be shortened to `width_min`.
    #[must_use]
    pub fn flexible_to(self, width_min: usize) -> Self {
        Self { flexible: true, width_min, ..self }
    }

    /// Does not allow the column to be dropped; the opposite of `importance`.
    #[must_use]
    pub fn kept(self) -> Self {
        self.importance(u8::MAX)
    }

    /// Allows the column to be dropped; the least important is dropped first.
    #[must_use]
    pub fn importance(self, importance: u8) -> Self {
        Self { importance, ..self }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<TableColumn>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: impl IntoIterator<Item = TableColumn>) -> Self {
        Self { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// Adds a row with one cell for each column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    /// The table as lines, none wider than `width`.
    pub fn render(&self, width: Option<usize>, style: Style) -> String {
        let lines = self.cells(width, false).into_iter().enumerate().map(|(number, cells)| {
            let mut line = String::new();
            for (position, (_, cell)) in cells.iter().enumerate() {
                if position > 0 {
                    line.push_str(&" ".repeat(GAP));
                }
                line.push_str(cell);
            }
            let line = line.trim_end();
            // The columns cannot be reduced further: truncate rather than break the line.
            let line = width.map_or_else(|| line.to_owned(), |width| shorten(line, width));
            if number == 0 { style.paint(style::DIM, &line) } else { line }
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The cells of the headings and of each row, each with the index of its column. Only the
    /// columns that fit into `width` are included. Cells are padded to the width of their column;
    /// the caller puts two spaces between them. With `fill`, the first column takes the remaining
    /// width.
    pub fn cells(&self, width: Option<usize>, fill: bool) -> Vec<Vec<(usize, String)>> {
        let natural: Vec<usize> = (0..self.columns.len())
            .map(|index| {
                let cells = self.rows.iter().map(|row| row[index].width());
                cells.fold(self.columns[index].heading.width(), usize::max)
            })
            .collect();
        let (shown, mut widths) = self.fit(natural, width.unwrap_or(usize::MAX));
        if let (true, Some(width), Some(&first)) = (fill, width, shown.first()) {
            let used: usize = shown.iter().map(|&index| widths[index] + GAP).sum();
            widths[first] += (width + GAP).saturating_sub(used);
        }
        let headings: Vec<String> = self.columns.iter().map(|c| c.heading.to_owned()).collect();
        std::iter::once(&headings)
            .chain(&self.rows)
            .map(|row| shown.iter().map(|&at| (at, self.cell(at, &row[at], widths[at]))).collect())
            .collect()
    }

    /// Chooses columns and their widths.
    fn fit(&self, mut widths: Vec<usize>, width: usize) -> (Vec<usize>, Vec<usize>) {
        let is_empty = |index: usize| self.rows.iter().all(|row| row[index].is_empty());
        let is_shown = |&index: &usize| !self.columns[index].optional || !is_empty(index);
        let mut shown: Vec<usize> = (0..self.columns.len()).filter(is_shown).collect();
        let total = |shown: &[usize], widths: &[usize]| {
            shown.iter().map(|&index| widths[index] + GAP).sum::<usize>().saturating_sub(GAP)
        };
        loop {
            let excess = total(&shown, &widths).saturating_sub(width);
            if excess == 0 {
                break;
            }
            // Shorten flexible columns if that is enough; else drop a column.
            let spare: usize = shown
                .iter()
                .filter(|&&index| self.columns[index].flexible)
                .map(|&index| widths[index].saturating_sub(self.columns[index].width_min))
                .sum();
            let least_important = shown
                .iter()
                .copied()
                .filter(|&index| self.columns[index].importance < u8::MAX)
                .min_by_key(|&index| self.columns[index].importance);
            match least_important {
                Some(index) if spare < excess => shown.retain(|&other| other != index),
                _ => {
                    let can_shorten = |&index: &usize| {
                        self.columns[index].flexible
                            && widths[index] > self.columns[index].width_min
                    };
                    let longest = shown
                        .iter()
                        .copied()
                        .filter(can_shorten)
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

    fn cell(&self, column: usize, text: &str, width: usize) -> String {
        let column = &self.columns[column];
        let keeps_end = column.path && text.starts_with('/');
        let cell = if keeps_end { shorten_front(text, width) } else { shorten(text, width) };
        let padding = " ".repeat(width.saturating_sub(cell.width()));
        if column.right { padding + &cell } else { cell + &padding }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new([
            TableColumn::text("NAME").flexible(),
            TableColumn::number("SIZE"),
            TableColumn::text("STATE").importance(3),
            TableColumn::text("IMAGE").flexible().importance(2),
            TableColumn::number("QUEUES").importance(1),
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
    fn filled_cells_take_the_whole_width_and_keep_the_end_of_paths() {
        let mut table = Table::new([
            TableColumn::text("FILE").flexible_path(6),
            TableColumn::number("READ/S"),
            TableColumn::text("KIND").importance(1),
            TableColumn::text("PROCESS").optional(),
        ]);
        table.row(["/srv/web/index.html".into(), "12".into(), "data".into(), String::new()]);
        for width in [18, 24, 60] {
            let lines = table.cells(Some(width), true);
            for cells in &lines {
                let sum: usize = cells.iter().map(|(_, cell)| cell.width() + 2).sum();
                assert_eq!(sum, width + 2, "{cells:?}");
            }
            assert!(lines[1][0].1.trim_end().ends_with("x.html"), "{lines:?}");
        }
        assert_eq!(table.cells(Some(18), true)[1].len(), 2);
    }

    #[test]
    fn nothing_is_too_narrow() {
        for width in 1..30 {
            assert!(widest(&table().render(Some(width), Style::PLAIN)) <= width);
        }
    }
}
