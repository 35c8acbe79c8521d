//! `Client`: the client library for Python.

use crate::call::Call;
use crate::convert;
use crate::error;
use crate::proxy::Proxy;
use crate::runtime::{Runtime, Threads};
use engram_client::{
    GetOptions, GroupSignal, Network, Options, OwnerKey, QualityOptions, RankOptions, RecallOptions, Rows, Session,
    Signals, Token, Updates, WriteResult,
};
use engram_identity::{ExpectedPeer, Files, Keys, Role, Roots, WatchedFiles, token};
use engram_memory::{Blobs, Group, MemoryId, OnMissing, key_id};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Columns of an array.
type Column<'py, T> = Option<PyReadonlyArray1<'py, T>>;

/// Connection to a cluster.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Client {
    threads: Arc<Threads>,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
}

struct Connection {
    client: engram_client::Client,
    session: Session,
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.threads.is_own() {
            // A lock of the parent's runtime may have been held when the process was forked.
            std::mem::forget(self.connection.take());
        }
    }
}

impl Client {
    fn connection(&self) -> &Connection {
        self.connection.as_ref().expect("is only absent while it is dropped")
    }

    pub(crate) fn client(&self) -> &engram_client::Client {
        &self.connection().client
    }

    pub(crate) const fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// Creates a write of this connection's session.
    fn write<F>(&self, timeout: Option<f64>, send: impl FnOnce(Session) -> F) -> Call
    where
        F: Future<Output = Result<WriteResult, engram_client::Error>> + Send + 'static,
    {
        let write = send(self.connection().session.clone());
        Call::new(&self.threads, timeout, write, |py, result| convert::object(py, convert::written(&result)))
    }
}

/// Creates the network of a client: TLS with a certificate, TLS with a token, or plaintext.
fn network(
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    token_file: Option<PathBuf>,
) -> Result<Network, String> {
    let expected = ExpectedPeer::any(Role::Worker);
    match (ca, certificate, token_file) {
        (None, None, None) => Ok(Network::default()),
        (Some(trust_bundle), Some(certificate), None) => {
            let key = key.unwrap_or_else(|| certificate.clone());
            let keys = Keys::open(Files { trust_bundle, certificate, key }).map_err(|error| error.to_string())?;
            Ok(Network::with_tls(keys, expected))
        }
        (Some(ca), None, Some(path)) => {
            let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
            let roots = WatchedFiles::open("CA certificates", vec![ca], parse).map_err(|error| error.to_string())?;
            let source = Token::file(&path).map_err(|error| error.to_string())?;
            let cluster = token::cluster_of(&source.text());
            let cluster = cluster.ok_or_else(|| {
                let audience = "required: one audience, engram/<cluster id>";
                format!("token: the token in {} has no cluster as audience; {audience}", path.display())
            })?;
            Ok(Network::with_token(source, roots, cluster, expected))
        }
        (None, ..) => Err("tls is absent, but a certificate or a token is given; both are sent over TLS only".into()),
        (Some(_), None, None) => Err("tls has a CA only; required: certificate, or token".into()),
        (Some(_), Some(_), Some(_)) => Err("tls has a certificate, and token is given; allowed: one of them".into()),
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (runtime, endpoints, *, cluster=None, owner_key=String::new(), ca=None, certificate=None, key=None,
        token_file=None, proxy=None, timeout=30.0))]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        endpoints: Vec<String>,
        cluster: Option<&str>,
        owner_key: String,
        ca: Option<PathBuf>,
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        token_file: Option<PathBuf>,
        proxy: Option<PathBuf>,
        timeout: f64,
    ) -> PyResult<Self> {
        let deadline = Duration::try_from_secs_f64(timeout)
            .map_err(|_| PyValueError::new_err(format!("timeout is {timeout}; allowed: seconds, above 0")))?;
        let secured = ca.is_some();
        let network = network(ca, certificate, key, token_file);
        let network = network.map_err(|text| error::raise(py, "Config", &text, None))?;
        let network = match proxy.map(Proxy::new) {
            // Without TLS the proxy makes the whole connection.
            Some(proxy) if !secured => Network::simulated(proxy),
            Some(proxy) => network.with_opener(Arc::new(proxy)),
            None => network,
        };
        let mut options = Options {
            network,
            owner_key: OwnerKey(owner_key),
            read_deadline: deadline,
            write_deadline: deadline,
            ..Options::new(endpoints)
        };
        if let Some(text) = cluster {
            let id = text.parse();
            options.cluster =
                Some(id.map_err(|_| PyValueError::new_err(format!("cluster is {text:?}; allowed: 32 hex digits")))?);
        }
        let threads = Arc::clone(&runtime.0);
        let client = threads.wait(py, None, engram_client::Client::connect(options))?;
        let session = client.session();
        Ok(Self { threads, connection: Some(Connection { client, session }) })
    }

    /// Process that the connection belongs to.
    #[getter]
    fn is_own(&self) -> bool {
        self.threads.is_own()
    }

    /// Deadline of calls that have none of their own, in seconds.
    #[getter]
    fn timeout(&self) -> f64 {
        self.client().options().read_deadline.as_secs_f64()
    }

    /// Inserts memories, or changes the given columns of existing ones.
    #[pyo3(signature = (ids, *, keys=None, weights=None, groups=None, features=None, payloads=None, timeout=None))]
    fn upsert(
        &self,
        ids: PyReadonlyArray1<'_, u64>,
        keys: Option<Vec<String>>,
        weights: Column<'_, f32>,
        groups: Column<'_, u8>,
        features: Option<PyReadonlyArray2<'_, f32>>,
        payloads: Option<Vec<Vec<u8>>>,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let mut rows = keys.map_or_else(Rows::default, Rows::keyed);
        if rows.keys.is_none() {
            rows.ids = convert::ids(&ids)?;
        }
        rows.weights = convert::optional(weights.as_ref())?;
        rows.groups = convert::groups(groups.as_ref())?;
        if let Some(features) = features {
            rows.features = features.as_slice()?.to_vec();
        }
        rows.payloads = payloads.map(|payloads| payloads.into_iter().collect());
        Ok(self.write(timeout, |session| async move { session.upsert(rows).await }))
    }

    /// Removes memories.
    #[pyo3(signature = (ids, *, timeout=None))]
    fn remove(&self, ids: PyReadonlyArray1<'_, u64>, timeout: Option<f64>) -> PyResult<Call> {
        let ids = convert::ids(&ids)?;
        Ok(self.write(timeout, |session| async move { session.remove(ids).await }))
    }

    /// Reinforces memories by quality or by change of weight.
    #[pyo3(signature = (ids, *, keys=None, qualities=None, deltas=None, create=false, timeout=None))]
    fn reinforce(
        &self,
        ids: PyReadonlyArray1<'_, u64>,
        keys: Option<Vec<String>>,
        qualities: Column<'_, f32>,
        deltas: Column<'_, f32>,
        create: bool,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let updates = updates(&ids, keys, qualities.as_ref(), deltas.as_ref(), create)?;
        Ok(self.write(timeout, |session| async move { session.reinforce(updates).await }))
    }

    /// Decays every memory.
    #[pyo3(signature = (amount, *, timeout=None))]
    fn decay(&self, amount: f64, timeout: Option<f64>) -> Call {
        self.write(timeout, move |session| async move { session.decay(amount).await })
    }

    /// Reads memories by id, in the given order.
    #[pyo3(signature = (ids, *, features=false, payloads=false, timeout=None))]
    fn get(
        &self,
        ids: PyReadonlyArray1<'_, u64>,
        features: bool,
        payloads: bool,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let (ids, client) = (convert::ids(&ids)?, self.client().clone());
        let read = async move { client.get(&ids, GetOptions { features, payloads }).await };
        Ok(Call::new(&self.threads, timeout, read, move |py, result| {
            let columns = convert::memories(py, &result.memories, true)?;
            let missing: Vec<u64> = result.missing.iter().map(|id| id.0).collect();
            columns.set_item("missing", missing.into_pyarray(py))?;
            if features {
                convert::add_features(&columns, &result.memories)?;
            }
            if payloads {
                convert::add_payloads(&columns, &result.memories)?;
            }
            Ok(columns.into_any().unbind())
        }))
    }

    /// Returns the memories of the greatest weights, descending.
    #[pyo3(signature = (limit, *, group=None, timeout=None))]
    fn rank(&self, limit: u64, group: Option<u8>, timeout: Option<f64>) -> Call {
        let options = RankOptions { limit, group: group.map(Group), keys: true };
        let client = self.client().clone();
        let ranked = async move {
            let mut ranking = client.rank(options).await?;
            let mut memories = Vec::new();
            while let Some(page) = ranking.next().await? {
                memories.extend(page);
            }
            Ok(memories)
        };
        Call::new(&self.threads, timeout, ranked, |py, memories| {
            Ok(convert::memories(py, &memories, true)?.into_any().unbind())
        })
    }

    /// Returns the memories most similar to `query`, descending by cosine times weight.
    #[pyo3(signature = (query, *, limit=10, group=None, timeout=None))]
    fn recall(
        &self,
        query: PyReadonlyArray1<'_, f32>,
        limit: u32,
        group: Option<u8>,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let options = RecallOptions { limit, group: group.map(Group), keys: true };
        let (query, client) = (convert::column(&query)?, self.client().clone());
        let recalled = async move { client.recall(query, options).await };
        Ok(Call::new(&self.threads, timeout, recalled, |py, matches| {
            let scores: Vec<f32> = matches.iter().map(|found| found.score).collect();
            let memories: Vec<_> = matches.into_iter().map(|found| found.memory).collect();
            let columns = convert::memories(py, &memories, true)?;
            columns.set_item("scores", scores.into_pyarray(py))?;
            Ok(columns.into_any().unbind())
        }))
    }

    /// Returns the figures of every group.
    #[pyo3(signature = (*, timeout=None))]
    fn quality(&self, timeout: Option<f64>) -> Call {
        let client = self.client().clone();
        let read = async move { client.quality(QualityOptions::default()).await };
        Call::new(&self.threads, timeout, read, |py, quality| convert::object(py, convert::quality(&quality.vector)))
    }

    /// Returns the digest of all memories as 32 hex digits, and their number.
    #[pyo3(signature = (*, timeout=None))]
    fn digest(&self, timeout: Option<f64>) -> Call {
        let client = self.client().clone();
        let read = async move { client.digest().await };
        Call::new(&self.threads, timeout, read, |py, result| {
            convert::object(py, (result.digest.to_string(), result.memories))
        })
    }

    /// Reinforces every memory of some groups, each with a quality.
    #[pyo3(signature = (groups, *, timeout=None))]
    fn reinforce_groups(&self, groups: Vec<(u8, f32)>, timeout: Option<f64>) -> Call {
        let signal = |(group, quality)| (Group(group), GroupSignal::Quality(quality));
        let groups: Vec<_> = groups.into_iter().map(signal).collect();
        self.write(timeout, |session| async move { session.reinforce_groups(&groups).await })
    }

    /// Returns cluster id, name, number of partitions, feature dimension, and per worker: ordinal, address, whether it is alive, and
    /// how many partitions it is primary of.
    fn map(&self) -> Call {
        let client = self.client().clone();
        let read = async move { client.refreshed_map().await };
        Call::new(&self.threads, None, read, |py, map| {
            let primaries = |ordinal| map.partitions.iter().filter(|placement| placement.primary == ordinal).count();
            let worker = |(ordinal, worker): (&engram_memory::Ordinal, &engram_client::Worker)| {
                (ordinal.0, worker.client_address.clone(), worker.alive, primaries(*ordinal))
            };
            let result = PyDict::new(py);
            result.set_item("cluster", map.cluster.to_string())?;
            result.set_item("name", &map.cluster_name)?;
            result.set_item("partitions", map.partition_count())?;
            result.set_item("dimension", map.feature_dimension)?;
            result.set_item("workers", map.workers.iter().map(worker).collect::<Vec<_>>())?;
            Ok(result.into_any().unbind())
        })
    }
}

/// Creates updates by id. Exactly one of the two signals is given.
fn updates(
    ids: &PyReadonlyArray1<'_, u64>,
    keys: Option<Vec<String>>,
    qualities: Option<&PyReadonlyArray1<'_, f32>>,
    deltas: Option<&PyReadonlyArray1<'_, f32>>,
    create: bool,
) -> PyResult<Updates> {
    let signals = match (qualities, deltas) {
        (Some(qualities), None) => Signals::Qualities(convert::column(qualities)?),
        (None, Some(deltas)) => Signals::Deltas(convert::column(deltas)?),
        _ => return Err(PyValueError::new_err("required: exactly one of qualities and deltas")),
    };
    let on_missing = if create { OnMissing::Create } else { OnMissing::Report };
    let keys = keys.map(|keys| keys.into_iter().map(String::into_bytes).collect::<Blobs>());
    Ok(Updates { ids: convert::ids(ids)?, signals, on_missing, keys })
}

/// Returns the ids of keys: the first 64 bits of their SHA-256.
#[pyfunction]
pub(crate) fn key_ids(py: Python<'_>, keys: Vec<String>) -> Bound<'_, PyArray1<u64>> {
    let id = |key: &String| -> u64 {
        let MemoryId(id) = key_id(key.as_bytes());
        id
    };
    keys.iter().map(id).collect::<Vec<u64>>().into_pyarray(py)
}
