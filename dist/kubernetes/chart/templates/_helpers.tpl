{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "flannel.labels" -}}
app: flannel
tier: node
{{- end }}

{{/* Of a pod: the selector's labels have to be among them as they are. */}}
{{- define "flannel.podLabels" -}}
{{- $labels := dict }}
{{- range list .Values.flannel.podLabels (include "flannel.labels" . | fromYaml) .Values.flannel.selectorLabels }}
{{- range $key, $value := . }}
{{- $_ := set $labels $key $value }}
{{- end }}
{{- end }}
{{- toYaml $labels }}
{{- end }}

{{/* A switch may be text: "true". */}}
{{- define "flannel.netpol" -}}
{{- if eq (toString .Values.netpol.enabled) "true" }}true{{ end }}
{{- end }}

{{- define "flannel.image" -}}
{{ .Values.flannel.image.repository }}:{{ .Values.flannel.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The network configuration as JSON, whatever the values hold. */}}
{{- define "flannel.netConf" -}}
{{- $options := dict
  "vxlan" (dict "Port" "backendPort" "VNI" "vni" "GBP" "GBP" "DirectRouting" "directRouting" "MTU" "mtu" "MacPrefix" "macPrefix")
  "wireguard" (dict "ListenPort" "backendPort" "ListenPortV6" "backendPortv6" "PSK" "psk" "MTU" "mtu" "Mode" "tunnelMode" "PersistentKeepaliveInterval" "keepaliveInterval")
  "udp" (dict "Port" "backendPort")
}}
{{- $backend := dict "Type" .Values.flannel.backend }}
{{- range $key, $value := dig .Values.flannel.backend dict $options }}
{{- $given := index $.Values.flannel $value }}
{{- /* As in flannel's chart, 0 and false mean unset. It writes all but two into JSON as they are,
so "8472" is a number there, and a text has quotes inside. */}}
{{- if $given }}
{{- if not (has $key (list "PSK" "MacPrefix")) }}
{{- $given = (printf "value: %v" $given | fromYaml).value }}
{{- end }}
{{- $_ := set $backend $key $given }}
{{- end }}
{{- end }}
{{- /* merge would take 0 and false for unset. */}}
{{- range $key, $value := .Values.flannel.backendOptions }}
{{- if not (hasKey $backend $key) }}
{{- $_ := set $backend $key $value }}
{{- end }}
{{- end }}
{{- $conf := dict "EnableNFTables" (eq (toString .Values.flannel.enableNFTables) "true") "Backend" $backend }}
{{- if .Values.podCidr }}
{{- $_ := set $conf "Network" .Values.podCidr }}
{{- else }}
{{- $_ := set $conf "EnableIPv4" false }}
{{- end }}
{{- if .Values.podCidrv6 }}
{{- $_ := set $conf "IPv6Network" .Values.podCidrv6 }}
{{- $_ := set $conf "EnableIPv6" true }}
{{- end }}
{{- if not (or .Values.podCidr .Values.podCidrv6) }}
{{- fail "podCidr and podCidrv6 are both empty: pods would have no addresses" }}
{{- end }}
{{- toPrettyJson $conf }}
{{- end }}

{{/* The beginning of the keys of annotations, as the flag --kube-annotation-prefix sets it. */}}
{{- define "flannel.annotationPrefix" -}}
{{- $prefix := "flannel.alpha.coreos.com" }}
{{- with regexFindAll "--?kube-annotation-prefix[= ]\\S+" (join " " .Values.flannel.args) -1 }}
{{- $prefix = regexReplaceAll "^.*[= ]" (last .) "" }}
{{- end }}
{{- if not (contains "/" $prefix) }}
{{- $prefix = print $prefix "/" }}
{{- else if not (regexMatch "[/-]$" $prefix) }}
{{- $prefix = print $prefix "-" }}
{{- end }}
{{- $prefix }}
{{- end }}

{{/* What no container of ours may do. */}}
{{- define "flannel.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end }}
