//! Addresses and links of the nodes: a bridge in node 1, the others on it by a pair of virtual links each.

use crate::cluster::Cluster;
use anyhow::Result;
use std::fmt::Write as _;

/// The most nodes that the addresses allow.
pub(crate) const MOST_NODES: u8 = 9;

/// Address of a node; a node's pods are 10.244.K.0/24, services 10.96.0.0/16.
pub(crate) fn address(node: u8) -> String {
    format!("10.97.0.{node}")
}

impl Cluster {
    /// Gives a node its links, addresses and routes.
    pub(crate) fn connect(&self, node: u8) -> Result<()> {
        let mut device = "eth0";
        if node == 1 {
            device = "nodebr0";
            // The address is fixed: otherwise a bridge takes the lowest address of its ports, a new node may change it, and the
            // older nodes are cut off for half a minute. The pair gives the bridge a carrier while it has no other port.
            self.ip(
                1,
                "link add nodebr0 address 02:00:00:00:00:01 type bridge\nlink add nv0 type veth peer name nv1\n\
                 link set nv0 master nodebr0 up\nlink set nv1 up",
            )?;
        } else {
            let holder = self.holder(node)?.pid;
            self.ip(
                1,
                &format!(
                    "link add ve{node} type veth peer name ve{node}p\nlink set ve{node} master nodebr0 up\n\
                     link set ve{node}p netns {holder}"
                ),
            )?;
            self.ip(node, &format!("link set ve{node}p name eth0"))?;
        }
        let own = address(node);
        // Kubelet and kube-proxy find their address by the default route; that neighbour does not exist.
        let mut lines = format!(
            "link set lo up\naddr add {own}/24 dev {device}\nlink set {device} up\nroute add default via 10.97.0.254 dev \
             {device}\n"
        );
        for other in (1..=MOST_NODES).filter(|&it| it != node) {
            writeln!(lines, "route add 10.244.{other}.0/24 via {}", address(other))?;
        }
        self.ip(node, &lines)?;
        // The second makes packets between pods of one node pass the rules of kube-proxy.
        for key in ["net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"] {
            self.in_network(node, "sh", ["-c", &format!("[ ! -e /proc/sys/{key} ] || echo 1 > /proc/sys/{key}")])?;
        }
        Ok(())
    }

    /// Commands of `ip`, one a line, in the network of a node.
    pub(crate) fn ip(&self, node: u8, lines: &str) -> Result<()> {
        self.in_network_fed(node, "ip", ["-batch", "-"], lines).map(drop)
    }
}
