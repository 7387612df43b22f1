//! Rows chosen, and computed from, each by itself.

use super::node::Selection;
use super::run::Run;
use super::vector::{column, filter};

/// The rows of a run that a selection leaves, and what it makes of them, if there are any.
pub(super) fn select(selection: &Selection, run: &Run) -> Option<Run> {
    let length = run.rows().end;
    let mut selected = None;
    if let Some(predicate) = &selection.predicate {
        let mut rows: Vec<u32> = run.rows().map(|row| row as u32).collect();
        filter(predicate, run, &mut rows);
        selected = Some(rows).filter(|rows| rows.len() < run.len());
    }
    let left = selected.as_ref().map_or(run.len(), Vec::len);
    if left == 0 {
        return None;
    }
    let rows = selected.as_deref();
    let columns = match (&selection.outputs, rows) {
        (Some(outputs), rows) => {
            outputs.iter().map(|output| column(output, run, rows, length)).collect()
        }
        (None, Some(rows)) => run.columns().iter().map(|each| each.gather(rows).into()).collect(),
        (None, None) => return Some(run.clone()),
    };
    Some(match rows {
        Some(rows) => run.gathered(rows, columns),
        None => run.with_columns(columns),
    })
}
