//! The files of the page.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

/// A file of the page: its name, its type, its content.
type Asset = (&'static str, &'static str, &'static [u8]);

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

macro_rules! asset {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_bytes!(concat!("assets/", $name)))
    };
}

const ASSETS: [Asset; 13] = [
    asset!("app.js", SCRIPT),
    asset!("charts.js", SCRIPT),
    asset!("disk.js", SCRIPT),
    asset!("host.js", SCRIPT),
    asset!("overview.js", SCRIPT),
    asset!("parts.js", SCRIPT),
    asset!("query.js", SCRIPT),
    asset!("who.js", SCRIPT),
    asset!("style.css", STYLE),
    asset!("uPlot.iife.min.js", SCRIPT),
    asset!("uPlot.min.css", STYLE),
    asset!("uPlot.LICENSE", "text/plain; charset=utf-8"),
    asset!("icon.svg", "image/svg+xml"),
];

/// The page.
pub(super) const PAGE: &str = include_str!("assets/index.html");
/// What asks for the token.
pub(super) const LOGIN: &str = include_str!("assets/login.html");

/// A file of the page.
pub(super) fn file(name: &str) -> Response {
    match ASSETS.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, content)) => ([(header::CONTENT_TYPE, *kind)], *content).into_response(),
        None => (StatusCode::NOT_FOUND, "There is no such file.\n").into_response(),
    }
}
