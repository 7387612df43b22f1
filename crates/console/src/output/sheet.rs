//! Facts about one thing, each on its own line: a name, and a value that wraps.
use unicode_width::UnicodeWidthStr;

use super::style::{self, Style};

/// Named values in order.
#[derive(Clone, Debug, Default)]
pub struct Sheet(Vec<(String, String)>);

impl Sheet {
    /// Adds a fact.
    pub fn fact(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// Adds a fact unless it is empty.
    pub fn fact_if_any(&mut self, name: &str, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            self.fact(name, value);
        }
    }

    /// The sheet as lines, broken between words if they would exceed `width`.
    pub fn render(&self, width: Option<usize>, style: Style) -> String {
        let indent = self.0.iter().map(|(name, _)| name.width()).max().unwrap_or(0) + 2;
        let room = width.unwrap_or(usize::MAX).saturating_sub(indent).max(20);
        let mut lines = Vec::new();
        for (name, value) in &self.0 {
            let mut label = name.as_str();
            for paragraph in value.lines() {
                for line in wrap(paragraph, room) {
                    let padding = " ".repeat(indent - label.width());
                    lines.push(format!("{}{padding}{line}", style.paint(style::DIM, label)));
                    label = "";
                }
            }
        }
        lines.join("\n")
    }
}

/// Breaks a text between words; does not break a word that exceeds `width`.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.width() + 1 + word.width() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_wrap_under_their_own_column() {
        let mut sheet = Sheet::default();
        sheet.fact("size", "10 GiB");
        sheet.fact("held by", "qemu-system-x86_64 (process 123, for writing)");
        sheet.fact_if_any("nothing", "");
        assert_eq!(
            sheet.render(Some(34), Style::PLAIN),
            "size     10 GiB\n\
             held by  qemu-system-x86_64\n         (process 123, for\n         writing)"
        );
    }
}
