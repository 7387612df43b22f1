//! The endpoints of the control interface as typed values: what the router of the daemon, the
//! [`Client`](crate::Client) and the table of `docs/control.md` have in common.
//!
//! An [`Endpoint`] says with its type what a request has and what its answer is. It lies in the
//! file of its feature, beside these types and the method of the client. [`ENDPOINTS`] lists all.

mod query;

use std::any::{TypeId, type_name};
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::escape;

pub use query::{QueryError, read_query, write_query};

/// All endpoints, one list for each feature, in the order of `docs/control.md`.
pub static ENDPOINTS: [&[&(dyn AnyEndpoint + Sync)]; 23] = [
    crate::disk::ENDPOINTS,
    crate::moving::ENDPOINTS,
    crate::log::ENDPOINTS,
    crate::configuration::ENDPOINTS,
    crate::statistics::ENDPOINTS,
    crate::device::ENDPOINTS,
    crate::background::ENDPOINTS,
    crate::cache::ENDPOINTS,
    crate::offload::ENDPOINTS,
    crate::usage::ENDPOINTS,
    crate::insight::ENDPOINTS,
    crate::dirty::ENDPOINTS,
    crate::processes::ENDPOINTS,
    crate::patterns::ENDPOINTS,
    crate::lifetimes::ENDPOINTS,
    crate::pager::ENDPOINTS,
    crate::pool::ENDPOINTS,
    crate::flush::ENDPOINTS,
    crate::query::ENDPOINTS,
    crate::stream::ENDPOINTS,
    crate::monitor::ENDPOINTS,
    crate::audit::ENDPOINTS,
    crate::daemon::ENDPOINTS,
];

/// How the daemon comes to an answer. The router accepts only handlers that fit the cost.
pub trait Cost: 'static {
    /// The cost as a value.
    const KIND: CostKind;
    /// How long a client waits for an answer, unless its user sets another limit. A wait that the
    /// request itself asks for is added.
    const ANSWER_TIME_MAX: Duration = QUERY_TIME_MAX;
}

/// The costs, as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CostKind {
    /// That of [`AtOnce`].
    AtOnce,
    /// That of [`Waiting`].
    Waiting,
    /// That of [`Blocking`].
    Blocking,
    /// That of [`Change`].
    Change,
}

impl CostKind {
    /// The words of `docs/control.md`.
    pub fn words(self) -> &'static str {
        match self {
            Self::AtOnce => "at once",
            Self::Waiting => "waits",
            Self::Blocking => "work",
            Self::Change => "a change",
        }
    }
}

/// The answer is known: it needs no thread and waits for nothing. So it comes also while storage
/// hangs and every thread is in use.
#[derive(Clone, Copy, Debug)]
pub enum AtOnce {}

/// The answer comes when a time is over or something has happened, as the request says. No thread
/// waits meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum Waiting {}

/// The answer takes work, or looks at files. It is made by one of a few threads that only this
/// endpoint uses.
#[derive(Clone, Copy, Debug)]
pub enum Blocking {}

/// The request changes something, and may hang as long as storage does. The number of changes in
/// progress is limited.
#[derive(Clone, Copy, Debug)]
pub enum Change {}

/// How long an answer may take that changes nothing.
const QUERY_TIME_MAX: Duration = Duration::from_secs(10);
/// How long the answer to a change may take. The daemon itself waits for up to 45 s for a change.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(60);

impl Cost for AtOnce {
    const KIND: CostKind = CostKind::AtOnce;
}

impl Cost for Waiting {
    const KIND: CostKind = CostKind::Waiting;
}

impl Cost for Blocking {
    const KIND: CostKind = CostKind::Blocking;
}

impl Cost for Change {
    const KIND: CostKind = CostKind::Change;
    const ANSWER_TIME_MAX: Duration = CHANGE_TIME_MAX;
}

/// The method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Reads.
    Get,
    /// Adds something, or begins an action.
    Post,
    /// Changes what there is.
    Patch,
    /// Removes.
    Delete,
}

impl Method {
    /// The name in HTTP.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The parameters in the path of an endpoint, one for each pair of braces.
pub trait PathParameters: Send + 'static {
    /// The number of parameters.
    const COUNT: usize;

    /// The values, in the order of the path.
    fn values(&self) -> Vec<&str>;

    /// The parameters with these values; `None` unless there are [`Self::COUNT`].
    fn from_values(values: Vec<String>) -> Option<Self>
    where
        Self: Sized;
}

impl PathParameters for () {
    const COUNT: usize = 0;

    fn values(&self) -> Vec<&str> {
        Vec::new()
    }

    fn from_values(values: Vec<String>) -> Option<Self> {
        values.is_empty().then_some(())
    }
}

impl PathParameters for String {
    const COUNT: usize = 1;

    fn values(&self) -> Vec<&str> {
        vec![self]
    }

    fn from_values(values: Vec<String>) -> Option<Self> {
        let [only] = <[String; 1]>::try_from(values).ok()?;
        Some(only)
    }
}

impl PathParameters for (String, String) {
    const COUNT: usize = 2;

    fn values(&self) -> Vec<&str> {
        vec![&self.0, &self.1]
    }

    fn from_values(values: Vec<String>) -> Option<Self> {
        let [first, second] = <[String; 2]>::try_from(values).ok()?;
        Some((first, second))
    }
}

/// The parameters behind the question mark. Each field of the structure is one: a text, a number, a
/// boolean, an option of these, or a list for a parameter that may be repeated.
pub trait Query: Serialize + DeserializeOwned + Default + Send + 'static {
    /// The name of each field, and how its value is shown in a path.
    const PARAMETERS: &'static [(&'static str, &'static str)];

    /// How long the request asks the daemon to wait before it answers.
    fn wait(&self) -> Duration {
        Duration::ZERO
    }
}

impl Query for () {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[];
}

/// An endpoint of cost `C` with the parameters `P` in its path, the query `Q`, a body `B` (none
/// if `()`) and the answer `A`.
pub struct Endpoint<C, P, Q, B, A> {
    method: Method,
    path: &'static str,
    meaning: &'static str,
    status: u16,
    has_content: bool,
    types: Types<C, P, Q, B, A>,
}

type Types<C, P, Q, B, A> = PhantomData<fn() -> (C, P, Q, B, A)>;

impl<C: Cost, P: PathParameters, Q, B, A> Endpoint<C, P, Q, B, A> {
    /// The endpoint at `path`, in which each parameter is a name in braces. `meaning` is what
    /// `docs/control.md` says behind the type of the answer.
    const fn new(method: Method, path: &'static str, meaning: &'static str) -> Self {
        let (bytes, mut at, mut count) = (path.as_bytes(), 0, 0);
        while at < bytes.len() {
            count += (bytes[at] == b'{') as usize;
            at += 1;
        }
        assert!(count == P::COUNT, "the path has other parameters than the type");
        Self { method, path, meaning, status: 200, has_content: false, types: PhantomData }
    }

    pub(crate) const fn get(path: &'static str, meaning: &'static str) -> Self {
        Self::new(Method::Get, path, meaning)
    }

    pub(crate) const fn post(path: &'static str, meaning: &'static str) -> Self {
        Self::new(Method::Post, path, meaning)
    }

    pub(crate) const fn patch(path: &'static str, meaning: &'static str) -> Self {
        Self::new(Method::Patch, path, meaning)
    }

    pub(crate) const fn delete(path: &'static str, meaning: &'static str) -> Self {
        Self::new(Method::Delete, path, meaning)
    }

    /// The same endpoint; its success has another status than 200.
    pub(crate) const fn with_status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    /// The same endpoint; its answer has what is on disks.
    pub(crate) const fn with_content(self) -> Self {
        Self { has_content: true, ..self }
    }

    /// The method.
    pub const fn method(&self) -> Method {
        self.method
    }

    /// The path, with the names of its parameters in braces.
    pub const fn path(&self) -> &'static str {
        self.path
    }

    /// The HTTP status of a success.
    pub const fn status(&self) -> u16 {
        self.status
    }
}

impl<C: Cost, P: PathParameters, Q: Query, B, A> Endpoint<C, P, Q, B, A> {
    /// The path of a request with these parameters, percent-encoded.
    pub fn filled(&self, parameters: &P, query: &Q) -> String {
        let (mut path, mut values) = (String::new(), parameters.values().into_iter());
        for (number, part) in self.path.split(['{', '}']).enumerate() {
            // Every second part is the name of a parameter.
            if number % 2 == 0 {
                path.push_str(part);
            } else {
                path.push_str(&escape(values.next().unwrap_or_default()));
            }
        }
        path.push_str(&write_query(query));
        path
    }
}

impl<C, P, Q, B, A> fmt::Debug for Endpoint<C, P, Q, B, A> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.method, self.path)
    }
}

/// What `docs/control.md` says of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointRow {
    /// The method.
    pub method: Method,
    /// The path, with the names of its parameters in braces.
    pub path: &'static str,
    /// The names of the query's parameters, and how their values are shown.
    pub parameters: &'static [(&'static str, &'static str)],
    /// The parameters that the query's type has; the same as `parameters` have.
    pub fields: &'static [&'static str],
    /// The type of the body; `None` without one.
    pub body: Option<&'static str>,
    /// The type of the answer.
    pub answer: &'static str,
    /// The cost.
    pub cost: CostKind,
    /// Whether the answer has what is on disks.
    pub has_content: bool,
    /// What the answer has and when it comes.
    pub meaning: &'static str,
}

impl EndpointRow {
    /// Whether those who may only look may use it: it changes nothing, and its answer has nothing
    /// of what is on disks.
    pub fn is_view(&self) -> bool {
        self.method == Method::Get && self.cost != CostKind::Change && !self.has_content
    }

    /// The path with the parameters of the query.
    pub fn shown(&self) -> String {
        let mut shown = self.path.to_owned();
        for (number, (name, value)) in self.parameters.iter().enumerate() {
            shown.push(if number == 0 { '?' } else { '&' });
            shown.push_str(name);
            shown.push('=');
            shown.push_str(value);
        }
        shown
    }
}

/// An endpoint of any type.
pub trait AnyEndpoint {
    /// What is known of the endpoint.
    fn row(&self) -> EndpointRow;
}

impl<C, P, Q, B, A> AnyEndpoint for Endpoint<C, P, Q, B, A>
where
    C: Cost,
    P: PathParameters,
    Q: Query,
    B: 'static,
{
    fn row(&self) -> EndpointRow {
        EndpointRow {
            method: self.method,
            path: self.path,
            parameters: Q::PARAMETERS,
            fields: fathom_options::fields::<Q>(),
            body: has_body::<B>().then(short_name::<B>),
            answer: short_name::<A>(),
            cost: C::KIND,
            has_content: self.has_content,
            meaning: self.meaning,
        }
    }
}

/// Whether a request of the type `B` has a body.
pub fn has_body<B: 'static>() -> bool {
    TypeId::of::<B>() != TypeId::of::<()>()
}

/// The name of a type, without its module.
fn short_name<T>() -> &'static str {
    type_name::<T>().rsplit("::").next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::endpoints;

    fn rows() -> Vec<EndpointRow> {
        ENDPOINTS.iter().flat_map(|list| list.iter()).map(|endpoint| endpoint.row()).collect()
    }

    #[test]
    fn each_endpoint_has_a_method_and_a_path_of_its_own() {
        let rows = rows();
        let keys: BTreeSet<_> = rows.iter().map(|row| (row.path, row.method.name())).collect();
        assert_eq!(keys.len(), rows.len());
    }

    #[test]
    fn those_who_only_look_change_nothing() {
        for row in rows() {
            let is_change = row.method != Method::Get || row.cost == CostKind::Change;
            assert_eq!(
                row.is_view(),
                !is_change && row.path != "/v1/stores/stream",
                "{}",
                row.path
            );
        }
    }

    #[test]
    fn the_parameters_that_are_shown_are_those_that_are_read() {
        for row in rows() {
            let shown: Vec<&str> = row.parameters.iter().map(|(name, _)| *name).collect();
            assert_eq!(shown, row.fields, "{}", row.path);
        }
    }

    #[test]
    fn a_path_is_filled_with_its_parameters() {
        let (cluster, volume) = ("a/b".to_owned(), "{c".to_owned());
        assert_eq!(
            endpoints::FORGET_VOLUME.filled(&(cluster, volume), &()),
            "/v1/clusters/a%2Fb/volumes/%7Bc"
        );
        let query = crate::RemoveQuery { force: true, temporary: false };
        let name = "web data".to_owned();
        assert_eq!(endpoints::REMOVE_DISK.filled(&name, &query), "/v1/disks/web%20data?force=true");
        assert_eq!(endpoints::DISK_LIST.filled(&(), &()), "/v1/disks");
    }

    #[test]
    fn only_as_many_values_as_a_path_has_are_taken() {
        let some = |count: usize| vec![String::new(); count];
        assert_eq!(<()>::from_values(some(0)), Some(()));
        assert_eq!(<()>::from_values(some(1)), None);
        assert_eq!(String::from_values(some(1)), Some(String::new()));
        assert_eq!(String::from_values(some(2)), None);
        assert!(<(String, String)>::from_values(some(2)).is_some());
        assert!(<(String, String)>::from_values(some(1)).is_none());
    }
}
