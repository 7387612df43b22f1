//! The display of errors and warnings about queries.
use fathom_cql::Diagnostic;

use crate::failure::Failure;

/// A failure with all errors of a script.
pub fn failure(script: &str, diagnostics: &[Diagnostic]) -> Failure {
    let texts: Vec<String> =
        diagnostics.iter().map(|diagnostic| diagnostic.render(script)).collect();
    let failure = Failure::new(texts.join("\n"));
    match diagnostics.iter().find_map(Diagnostic::render_help) {
        Some(help) => failure.advise(help),
        None => failure,
    }
}

/// A warning with its place and its remedy.
pub fn remark(script: &str, diagnostic: &Diagnostic) -> String {
    let text = diagnostic.render(script);
    match diagnostic.render_help() {
        Some(help) => format!("{text}\n→ {help}"),
        None => text,
    }
}
