//! Filters and projections of single rows.

use super::node::Selection;
use super::run::Run;
use super::vector::{column, filter};

/// The rows of a run that pass a selection's filter, projected; `None` if there are none.
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
    let columns = selection
        .outputs
        .as_ref()
        .map(|outputs| outputs.iter().map(|output| column(output, run, rows, length)).collect());
    Some(match (rows, columns) {
        (Some(rows), Some(columns)) => run.gathered(rows, columns),
        (Some(rows), None) => run.gather(rows),
        (None, Some(columns)) => run.with_columns(columns),
        (None, None) => run.clone(),
    })
}
