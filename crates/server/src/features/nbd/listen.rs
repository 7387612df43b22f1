//! How a listener begins to listen, and what a reload takes from the host again: keys that were
//! renewed, and a socket whose path was deleted.

use std::io;
use std::net::ToSocketAddrs;
use std::sync::Arc;

use fathom_control::{ErrorBody, ErrorCode, ListenerDefinition, ReloadReport, TlsDefinition};
use fathom_frontend::nbd;
use fathom_tls::{Certificates, Tls};

use crate::configuration::{Address, parse_address};
use crate::daemon::refresh::Content;
use crate::daemon::stack::{refusal, socket_refusal};
use crate::daemon::{Daemon, Listening};
use crate::process::group::admit;

/// Serves `exports` to NBD clients.
pub(super) fn start_listener(
    definition: &ListenerDefinition,
    exports: &Arc<nbd::Exports>,
    budget: &Arc<nbd::RequestBudget>,
) -> Result<nbd::Listener, ErrorBody> {
    let invalid = |message: String| refusal(ErrorCode::Invalid, message, "correct the address");
    let address = match parse_address(&definition.address) {
        Some(Address::Unix(path)) => nbd::Address::Unix(path),
        Some(Address::Tcp(text)) => {
            let mut found = text.to_socket_addrs().map_err(|error| {
                invalid(format!("the address {text} cannot be resolved: {error}"))
            })?;
            let first = found
                .next()
                .ok_or_else(|| invalid(format!("the address {text} cannot be resolved")))?;
            nbd::Address::Tcp(first)
        }
        None => return Err(invalid(format!("{:?} is not an address", definition.address))),
    };
    let mut options = nbd::ListenerOptions::new(address);
    options.plain_allowed = definition.plain_allowed;
    options.budget = Arc::clone(budget);
    options.tls = definition.tls.as_ref().map(make_tls).transpose()?;
    let refused = |error: &io::Error| socket_refusal(&definition.address, error);
    let listener =
        nbd::Listener::new(options, Arc::clone(exports)).map_err(|error| refused(&error))?;
    if let (nbd::Address::Unix(path), Some(group)) = (listener.address(), &definition.group) {
        admit(path, group).map_err(|error| refused(&error))?;
    }
    Ok(listener)
}

/// The keys of a listener, read from their files.
fn make_tls(definition: &TlsDefinition) -> Result<Tls, ErrorBody> {
    let unfit = |error: io::Error| {
        let message = format!("TLS for NBD cannot be set up: {error}");
        refusal(ErrorCode::Failed, message, "correct the files in [nbd.tls]")
    };
    match (&definition.psk, &definition.certificate, &definition.key) {
        (Some(psk), None, None) => Tls::shared_keys(psk).map_err(unfit),
        (None, Some(certificate), Some(key)) => {
            let certificates = Certificates {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: definition.client_ca.clone(),
            };
            Tls::server(&certificates).map_err(unfit)
        }
        _ => Err(refusal(
            ErrorCode::Invalid,
            "TLS requires a certificate and its key, or shared keys",
            "add `certificate` and `key`, or `psk`",
        )),
    }
}

/// The content of the files with the keys of a listener.
pub(super) fn keys_of(definition: &ListenerDefinition) -> Content {
    let tls = definition.tls.iter();
    Content::of(tls.flat_map(|tls| [&tls.certificate, &tls.key, &tls.client_ca, &tls.psk]))
}

impl Daemon {
    /// Reads the keys of listeners again, and makes deleted sockets again.
    pub(super) fn refresh_listeners(&self, report: &mut ReloadReport) {
        for listening in self.listening() {
            let address = listening.address();
            let mut note = |outcome: Result<bool, ErrorBody>, what: String| match outcome {
                Ok(true) => report.changed.push(what),
                Ok(false) => {}
                Err(refused) => report.refused.push(refused.to_string()),
            };
            note(refresh_keys(&listening), format!("the listener at {address} has other keys"));
            note(
                make_again(&listening),
                format!("the socket of the listener at {address} was made again"),
            );
        }
    }
}

/// Reads the keys of a listener again if its files differ. It keeps those that it has if they
/// cannot be used.
fn refresh_keys(listening: &Listening) -> Result<bool, ErrorBody> {
    let definition = listening.definition();
    let (Some(tls), mut keys) = (&definition.tls, listening.keys.lock()) else { return Ok(false) };
    let new = keys_of(&definition);
    if *keys == new {
        return Ok(false);
    }
    let tls = make_tls(tls).map_err(|mut refused| {
        refused.message += "; the listener keeps the keys that it has";
        refused
    })?;
    let listener = listening.listener();
    let Some(listener) = &*listener else { return Ok(false) };
    listener.set_tls(tls);
    *keys = new;
    Ok(true)
}

/// Makes the socket of a listener again if its path was deleted.
fn make_again(listening: &Listening) -> Result<bool, ErrorBody> {
    let definition = listening.definition();
    let listener = listening.listener();
    let Some(listener) = &*listener else { return Ok(false) };
    let refused = |error| socket_refusal(&definition.address, &error);
    let is_made = listener.listen_again().map_err(refused)?;
    if let (true, Some(Address::Unix(path)), Some(group)) =
        (is_made, parse_address(&definition.address), &definition.group)
    {
        admit(&path, group).map_err(refused)?;
    }
    Ok(is_made)
}
